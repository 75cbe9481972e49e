"""Similar items of small tensors, opened many at a time.

torch writes the items of tensors of one shape and type as archives of the same bytes, except for
the elements and their CRC-32 (torch 2.1 to 2.13). One is opened; the others are compared with it,
one window of a file at a time, in everything that its opening read. An item that differs is left to
``locate_item``, which reports why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ckptool.core.catalog import Extent, Record
from ckptool.core.dtype import DType
from ckptool.errors import CkptoolError
from ckptool.formats.dcp.opening import Item, locate_item
from ckptool.serialization.archive.cached import CachedArchive, match_cached
from ckptool.serialization.source import EDGE, Source
from ckptool.serialization.zip import CRC32_NBYTES, Region

_LARGEST = 4 * EDGE
"""Bytes of the largest item that is read whole to open it."""
_FEWEST = 16
_WINDOW, _NEAR = 1 << 20, 1 << 12

Kind = tuple[int, DType, tuple[int, ...]]
"""Bytes of an item, and the type and shape that the metadata says it has."""
AlikePlaces = dict[tuple[str, int, Kind], Extent]
"""The places of items' elements, by file, offset and kind."""


def kind_of(item: Item) -> Kind:
    """Return the kind that items must share to be similar."""
    return item.at.nbytes, item.dtype, item.shape


def locate_alike(source: Source, items: Iterable[Item]) -> AlikePlaces:
    """Return the places of the elements of small items that are similar to an opened one."""
    by_kind: dict[Kind, dict[str, list[int]]] = {}
    firsts: dict[Kind, Item] = {}
    for item in items:
        if item.at.nbytes <= _LARGEST and not item.at.transforms:
            kind = kind_of(item)
            by_kind.setdefault(kind, {}).setdefault(item.at.file, []).append(item.at.offset)
            firsts.setdefault(kind, item)
    places: AlikePlaces = {}
    for kind, by_file in by_kind.items():
        model = _open_model(source, firsts[kind]) if _are_many(by_file.values()) else None
        if model is not None:
            for file, offsets in by_file.items():
                for place, at in model.locate(source, file, sorted({*offsets})):
                    places[file, at, kind] = place
    return places


def _are_many(offsets: Iterable[Sequence[int]]) -> bool:
    return sum(map(len, offsets)) >= _FEWEST


def _open_model(source: Source, item: Item) -> _Model | None:
    """Open the item that others are compared with; None if it is not plain, or damaged."""
    try:
        place = locate_item(source, item)
        archive = match_cached(Region(source, item.at.file, item.at.offset, item.at.nbytes))
    except CkptoolError:
        return None
    if archive is None or len(archive.noted) != 1:
        return None
    if not isinstance(place, Extent) or place.record is None:
        return None
    return _Model(archive, place, place.record, item.at.offset, item.at.nbytes)


class _Model(NamedTuple):
    """An opened item: its archive, and the place and record of its elements."""

    archive: CachedArchive
    place: Extent
    record: Record
    offset: int
    nbytes: int

    def locate(
        self, source: Source, file: str, offsets: Sequence[int]
    ) -> Iterator[tuple[Extent, int]]:
        """Yield the places of the elements of a file's items at these offsets, with each offset."""
        start, inside = self.place.offset - self.offset, self.record.offset - self.offset
        strides, nbytes, ops = self.place.strides, self.record.nbytes, self.place.ops
        for window in _windows(offsets, self.nbytes):
            crcs: list[int] = []
            with suppress(CkptoolError):  # reported when each is opened
                crcs = self._checksums(source, file, window)
            for at, crc in zip(window, crcs, strict=False):
                if crc:
                    record = Record(file, at + inside, nbytes, crc)
                    yield Extent(file, at + start, strides, record, ops), at

    def _checksums(self, source: Source, file: str, offsets: Sequence[int]) -> list[int]:
        """Return the CRC-32 that each item records, 0 for those that are not similar."""
        import numpy as np
        from numpy.lib.stride_tricks import sliding_window_view

        first = offsets[0]
        data = np.frombuffer(source.read(file, first, offsets[-1] + self.nbytes - first), "u1")
        begins, done = np.array(offsets) - first, 0

        def bytes_at(start: int, nbytes: int) -> Any:
            """Return these bytes of each item: nothing else, as items may overlap."""
            return sliding_window_view(data, nbytes)[begins + start]

        is_alike, read = np.ones(len(begins), bool), np.frombuffer(self.archive.read, "u1")
        for start, end in self.archive.spans:
            is_alike &= (bytes_at(start, end - start) == read[done : done + end - start]).all(
                axis=1
            )
            done += end - start
        (noted,) = self.archive.noted.values()
        crcs = bytes_at(noted, CRC32_NBYTES).view("<u4")[:, 0]
        found: list[int] = np.where(is_alike, crcs, 0).tolist()
        return found


def _windows(offsets: Sequence[int], nbytes: int) -> Iterator[list[int]]:
    """Yield offsets, in order, of items that are close enough to be read at once."""
    window: list[int] = []
    for at in offsets:
        if window and (at - window[-1] > nbytes + _NEAR or at + nbytes - window[0] > _WINDOW):
            yield window
            window = []
        window.append(at)
    if window:
        yield window
