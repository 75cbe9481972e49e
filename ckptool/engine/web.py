"""Checkpoints on the web, which lists nothing: their files are those that their metadata names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

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


def is_file(url: str) -> bool:
    """Whether a URL names a file, by how it ends."""
    return url.partition("?")[0].endswith(_FILES)


def names_below(size_of: Callable[[str], int | None], read: Callable[[str], bytes]) -> list[str]:
    """The files of a folder: those that many have, and those that an index or ``.metadata`` names.

    ``size_of`` is None for a file that is not there. NotFound where none of them is.
    """
    found = [name for name, size in sizes(_KNOWN, size_of).items() if size is not None]
    if not found:
        raise NotFound("the web lists no files, and no index and no .metadata is there")
    named = {
        match.decode() for name in found if name in _INDEXES for match in _NAMED.findall(read(name))
    }
    return sorted({*found, *named})


def sizes(names: Iterable[str], size_of: Callable[[str], int | None]) -> dict[str, int | None]:
    """The sizes of some files in bytes, several asked for at once."""
    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(size_of, names), strict=True))
