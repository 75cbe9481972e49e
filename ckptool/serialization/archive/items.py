"""torch.save archives that lie one after another in a file.

Where nothing says where they lie, they are found: the zip64 locator that torch always writes (torch
1.6 to 2.13) states where the end record lies, counted from the archive's first byte; where that
holds, one ends.

A source in memory: the two ends of a decoded blob.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

from ckptool.core.catalog import Container
from ckptool.core.codec import zstd_edges
from ckptool.errors import Damaged
from ckptool.serialization.source import Source
from ckptool.serialization.zip import Region

_LOCATOR = b"PK\x06\x07"
_TAIL = struct.Struct("<4sLQL4s")
_END64_NBYTES = 56
_BLOCK = 1 << 22
_END_NBYTES = 22


def item_region(source: Source, item: Container, what: str, limit: int, edge: int) -> Region:
    """The bytes of an item as a region of its own, decoded where it is packed.

    Of a packed one, of ``limit`` decoded bytes at most, the first and last ``edge`` are at hand.
    """
    if not item.transforms:
        return Region(source, item.file, item.offset, item.nbytes)
    packed = source.read(item.file, item.offset, item.nbytes)
    head, tail, size = zstd_edges(packed, limit, edge, what=f"{what} in {item.file}")
    return Region(EdgeSource(item.file, head, tail, size), item.file, 0, size)


def find_archives(source: Source, file: str) -> list[Container]:
    """Every archive that lies whole in a file, in order; what lies between them is passed over.

    One that lies in the data of another is a part of it.
    """
    found: list[Container] = []
    for where, at in _ends(source, file):
        start = at - _END64_NBYTES - where
        end = at + _TAIL.size - 4 + _END_NBYTES
        is_one = start >= 0 and end <= source.files[file]
        if not is_one or source.read(file, start, 4) != b"PK\x03\x04":
            continue
        while found and found[-1].offset >= start:
            found.pop()
        if not found or found[-1].offset + found[-1].nbytes <= start:
            found.append(Container(file, start, end - start))
    return found


def _ends(source: Source, file: str) -> Iterator[tuple[int, int]]:
    """What each locator states, and where it lies."""
    size = source.files[file]
    for block in range(0, size, _BLOCK):
        data = source.read(file, block, min(_BLOCK + _TAIL.size, size - block))
        at = data.find(_LOCATOR)
        while 0 <= at < _BLOCK:
            if at + _TAIL.size <= len(data):
                _, _, where, _, mark = _TAIL.unpack_from(data, at)
                if mark == b"PK\x05\x06":
                    yield where, block + at
            at = data.find(_LOCATOR, at + 1)


class EdgeSource:
    """One file of ``size`` bytes, of which the first and the last ones are at hand."""

    def __init__(self, file: str, head: bytes, tail: bytes, size: int) -> None:
        self._head, self._tail = head, tail
        self._size = size
        self.root = file
        self.files: Mapping[str, int] = {file: size}

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` at ``offset``; Damaged where they are not at hand."""
        if 0 <= offset <= offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        inside = offset - (self._size - len(self._tail))
        if inside >= 0 and nbytes >= 0 and inside + nbytes <= len(self._tail):
            return self._tail[inside : inside + nbytes]
        raise Damaged(
            f"{file}: {nbytes:,} bytes at {offset:,} of an encoded entry are out of range"
        )

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """All is at hand."""

    def narrowed(self, folder: str) -> EdgeSource:
        """A blob has no folders."""
        raise Damaged(f"{self.root}: no folder {folder}")
