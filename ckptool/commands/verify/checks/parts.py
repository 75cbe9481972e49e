"""Parts of a checkpoint in a store, each opened and read while its bytes are in memory.

An archive is opened at both ends before its records are read. A store answers late even to small
requests, so the archives of a file are fetched whole, in order, some of them ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Chunk, Container, Place, TensorEntry
from ckptool.serialization.source import edge_spans
from ckptool.storage.files import Files, ReadSpan
from ckptool.storage.planned_ranges import CAPACITY

_PART = CAPACITY * 3 // 8
"""Bytes of a part; two consecutive parts are in memory together."""


def parts(catalog: Catalog, source: Files) -> Iterator[tuple[Catalog, bool]]:
    """Yield the parts of a catalog, and whether everything to read of each was announced.

    Each item and each chunk is in one part; those that are too large, or are compared with copies
    elsewhere, are in the last part, which was not announced.
    """
    items = _Items(catalog)
    tensors: list[dict[str, TensorEntry]] = [{} for _ in items.groups]
    rest: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        chunks: dict[int | None, list[Chunk]] = {} if entry.chunks else {None: []}
        for chunk in entry.chunks:
            chunks.setdefault(items.group_of(chunk.at), []).append(chunk)
        for number, portion in chunks.items():
            part = rest if number is None else tensors[number]
            part[name] = replace(entry, chunks=tuple(portion))
    ends: deque[Callable[[], None]] = deque()
    try:
        for at, group in enumerate(items.groups):
            for ahead in items.groups[at + len(ends) : at + 2]:
                ends.append(source.plan_reads(run for item in ahead for run in _runs(item)))
            yield replace(catalog, tensors=tensors[at], archives=tuple(group)), True
            ends.popleft()()
    finally:
        for end in ends:
            end()
    archives = tuple(item for item in catalog.archives if items.group_of(item) is None)
    yield replace(catalog, tensors=rest, archives=archives), False


class _Items:
    """The items of a catalog; those that fit are grouped, file by file, up to a part's size."""

    def __init__(self, catalog: Catalog) -> None:
        self._items = sorted(set(catalog.archives), key=_place)
        self._starts = [_place(item) for item in self._items]
        self._group_of: dict[tuple[str, int], int] = {}
        self.groups: list[list[Container]] = []
        originals = {self._find(at) for at in _places_of_copies(catalog)}
        room = 0
        for item in self._items:
            if item.transforms or item.nbytes > _PART or item in originals:
                continue
            if item.nbytes > room:
                self.groups.append([])
                room = _PART
            self.groups[-1].append(item)
            self._group_of[_place(item)] = len(self.groups) - 1
            room -= item.nbytes

    def group_of(self, at: Place) -> int | None:
        """Return the number of the group whose item contains a place; None if there is none."""
        item = self._find(at)
        return None if item is None else self._group_of.get(_place(item))

    def _find(self, at: Place) -> Container | None:
        number = bisect_right(self._starts, _place(at)) - 1
        item = self._items[number] if number >= 0 else None
        is_inside = item and at.file == item.file and at.offset < item.offset + item.nbytes
        return item if is_inside else None


def _places_of_copies(catalog: Catalog) -> Iterator[Place]:
    """Yield the places of chunks that were stored several times."""
    for entry in catalog.tensors.values():
        for chunk in entry.chunks:
            if chunk.copies:
                yield from chunk.places


def _place(at: Place) -> tuple[str, int]:
    return at.file, at.offset


def _runs(item: Container) -> Iterator[ReadSpan]:
    """Yield at least what is read of an item: all of it, and both ends at every opening."""
    yield item.file, item.offset, item.nbytes
    for _ in range(2):  # to locate its tensors, and to check it
        yield from edge_spans(item.file, item.offset, item.nbytes)
