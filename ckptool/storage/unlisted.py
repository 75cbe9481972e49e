"""What can be known of a folder that cannot be listed: well-known files, and those they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptool.errors import NotFound
from ckptool.storage.commit_note import UNFINISHED

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".json", ".metadata")
_KNOWN = (
    ".metadata",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "pytorch_model.bin",
    "config.json",
    UNFINISHED,
)
INDEXES = _KNOWN[:3]
_NAMED = re.compile(rb"[\w.\-]+\.(?:distcp|safetensors|bin)\b")
_AT_ONCE = 16

InfoOf = Callable[[str], dict[str, Any] | None]
"""What a server says of a file by its name."""


def is_file(url: str) -> bool:
    """Whether a URL names a file, by how it ends."""
    return url.partition("?")[0].endswith(_FILES)


def names_below(info_of: InfoOf, read: Callable[[str], bytes]) -> list[str]:
    """Return the files of a folder: well-known ones, and those an index or ``.metadata`` names.

    ``info_of`` is None for a file that is not there. Raises NotFound if none of them is.
    """
    known = infos(_KNOWN, info_of)
    if not known:
        raise NotFound("no files can be listed, and no index or .metadata was found")
    named = {
        match.decode() for name in known if name in INDEXES for match in _NAMED.findall(read(name))
    }
    return sorted({*known, *named})


def infos(names: Iterable[str], info_of: InfoOf) -> dict[str, dict[str, Any]]:
    """Return what the server says of those files that are there; several are asked for at once."""
    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = zip(names, pool.map(info_of, names), strict=True)
        return {name: info for name, info in answers if info is not None}
