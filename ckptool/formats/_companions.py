"""Files that belong to a model but hold no tensor."""

from __future__ import annotations

from ckptool.formats.base import Source

_NAMES = frozenset(
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json"
    " special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt spiece.model"
    " preprocessor_config.json processor_config.json chat_template.json chat_template.jinja"
    " README.md LICENSE LICENSE.txt USE_POLICY.md NOTICE params.json video_preprocessor_config.json"
    " quantize_config.json hf_quant_config.json quant_config.json adapter_config.json".split()
)
_SUFFIXES = (".py", ".tiktoken")
_PROSE = frozenset("README.md LICENSE LICENSE.txt USE_POLICY.md NOTICE".split())


def companions(source: Source, folder: str = "") -> dict[str, int]:
    """The companion files directly in ``folder`` (with a trailing slash, or empty), with sizes."""
    return {
        name: size
        for name, size in source.files.items()
        if name.startswith(folder) and _is_companion(name[len(folder) :])
    }


def _is_companion(name: str) -> bool:
    return name in _NAMES or ("/" not in name and name.endswith(_SUFFIXES))


def is_of_model(path: str) -> bool:
    """Whether only a model's own files have this name, and no code or text that a person wrote."""
    name = path.rpartition("/")[2]
    return name in _NAMES - _PROSE or name.endswith(".tiktoken")
