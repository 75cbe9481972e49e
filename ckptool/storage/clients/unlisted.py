"""The files of a folder that cannot be listed: well-known ones, and those they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptool.errors import NotFound
from ckptool.storage.clients.client import AT_ONCE, ObjectInfo
from ckptool.storage.commit_note import UNFINISHED

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".json", ".metadata")
_KNOWN = (
    *(".metadata", "model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("model.safetensors", "pytorch_model.bin", "model.extra.pt", "config.json", UNFINISHED),
    *("adapter_model.safetensors", "adapter_config.json", "generation_config.json"),
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
)
"""The files that are asked for: of torch, ckptool, transformers, and others beside a model."""
INDEXES = _KNOWN[:3]
_NAMED = re.compile(rb"[\w.\-]+\.(?:distcp|safetensors|bin)\b")

InfoOf = Callable[[str], ObjectInfo | None]
"""The server's information on a file by name."""


def is_file(url: str) -> bool:
    """Return whether a URL names a file, by its suffix."""
    return url.partition("?")[0].endswith(_FILES)


def files_below(info_of: InfoOf, read: Callable[[str], bytes]) -> dict[str, ObjectInfo]:
    """Return the files of a folder: well-known ones, and those an index or ``.metadata`` names.

    ``info_of`` returns None for a missing file. Raises NotFound if none of them exists.
    """
    infos = _infos(_KNOWN, info_of)
    if not infos:
        raise NotFound("no files can be listed, and no index or .metadata was found")
    names = {
        match.decode() for name in infos if name in INDEXES for match in _NAMED.findall(read(name))
    }
    return infos | _infos(sorted(names - infos.keys()), info_of)


def _infos(names: Sequence[str], info_of: InfoOf) -> dict[str, ObjectInfo]:
    """Return the server's information on existing files; several are requested at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = zip(names, pool.map(info_of, names), strict=True)
        return {name: info for name, info in answers if info is not None}
