"""Checkpoints on the web, which lists nothing: their files are those that their metadata names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptool.errors import NotFound

SCHEMES = ("http", "https")
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".json", ".metadata")
_KNOWN = (
    ".metadata",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "pytorch_model.bin",
    "config.json",
)
_INDEXES = _KNOWN[:3]
_NAMED = re.compile(rb"[\w.\-]+\.(?:distcp|safetensors|bin)\b")
_AT_ONCE = 16

InfoOf = Callable[[str], dict[str, Any] | None]
"""What a server says of a file by its name."""


def is_file(url: str) -> bool:
    """Whether a URL names a file, by how it ends."""
    return url.partition("?")[0].endswith(_FILES)


def names_below(info_of: InfoOf, read: Callable[[str], bytes]) -> list[str]:
    """The files of a folder: those that many have, and those that an index or ``.metadata`` names.

    ``info_of`` is None for a file that is not there. NotFound where none of them is.
    """
    found = infos(_KNOWN, info_of)
    if not found:
        raise NotFound("the web lists no files, and no index and no .metadata is there")
    named = {
        match.decode() for name in found if name in _INDEXES for match in _NAMED.findall(read(name))
    }
    return sorted({*found, *named})


def infos(names: Iterable[str], info_of: InfoOf) -> dict[str, dict[str, Any]]:
    """What the server says of those of the files that are there, several asked for at once."""
    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = zip(names, pool.map(info_of, names), strict=True)
        return {name: info for name, info in answers if info is not None}
