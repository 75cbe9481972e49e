"""Files that belong to a model but hold no tensor."""

from __future__ import annotations

from collections.abc import Collection

from ckptool.formats.base import Source

_NAMES = frozenset(
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json"
    " special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt spiece.model"
    " preprocessor_config.json processor_config.json chat_template.json chat_template.jinja"
    " README.md LICENSE LICENSE.txt USE_POLICY.md NOTICE params.json video_preprocessor_config.json"
    " quantize_config.json hf_quant_config.json quant_config.json adapter_config.json".split()
)
_SUFFIXES = (".py", ".tiktoken")
_TENSORS = (".pt", ".pth", ".bin", ".safetensors")


def companions(source: Source, folder: str = "") -> dict[str, int]:
    """The companion files directly in ``folder`` (with a trailing slash, or empty), with sizes."""
    return {
        name: size
        for name, size in source.files.items()
        if name.startswith(folder) and _is_companion(name[len(folder) :])
    }


def _is_companion(name: str) -> bool:
    return name in _NAMES or ("/" not in name and name.endswith(_SUFFIXES))


def unread_beside(source: Source, files: Collection[str]) -> list[str]:
    """One note for files beside ``files`` that hold tensors as well, as a trainer leaves them."""
    folders = {file.rpartition("/")[0] for file in files}
    beside = [
        name
        for name in source.files
        if name.endswith(_TENSORS) and name not in files and name.rpartition("/")[0] in folders
    ]
    more = f", and {len(beside) - 8} more" if len(beside) > 8 else ""
    return [f"not read, beside it: {', '.join(beside[:8])}{more}"] if beside else []
