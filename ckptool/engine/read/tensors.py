"""Read tensors tile by tile, or into memory: jobs of the one read loop that yield elements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import (
    EncodedBlob,
    Extent,
    Place,
    TensorEntry,
    places,
    stored_places,
)
from ckptool.core.layout import tiles
from ckptool.core.sharding.index import ChunkIndex
from ckptool.engine.checksum import RecordCheck, require_intact
from ckptool.engine.read.byte_reader import ByteReader, ByteSource, ignore
from ckptool.engine.read.containers import Need, open_chunk
from ckptool.engine.read.segments import NotePiece, entry_needs, place_needs
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tiles import Job, read_tiles
from ckptool.errors import Problem
from ckptool.storage.files import TILE, Files

if TYPE_CHECKING:
    from ckptool.engine.read.gather import Gatherer
    from ckptool.engine.read.numbers import Array
    from ckptool.engine.read.range_check import RangeCheck


class TensorTile(Struct, frozen=True):
    """The elements of a box of a tensor, in an array of the box's shape.

    ``nbytes`` are those of the elements as stored.
    """

    box: Box
    values: Array
    nbytes: int


class TensorReader(ByteReader):
    """Reads ``elements`` as well, by numpy; ``ranges`` counts those that casts make infinite."""

    def __init__(
        self,
        source: Files,
        note: NotePiece = ignore,
        sums: ReadSums | None = None,
        ranges: RangeCheck | None = None,
    ) -> None:
        super().__init__(source, note, sums)
        self._ranges = ranges

    @cached_property
    def elements(self) -> Gatherer:
        """The reader of elements, which reads by this one."""
        from ckptool.engine.read.gather import Gatherer

        return Gatherer(self, self._ranges)

    def close(self) -> None:
        """Close all files, and let go of what refers to this reader, and holds memory."""
        self.__dict__.pop("elements", None)
        super().close()


class TensorSource(ByteSource, frozen=True):
    """Files to read boxes of tensors from; ``ranges`` counts what casts make infinite."""

    ranges: RangeCheck | None = None

    def reader(self) -> TensorReader:
        """Return the reader for one thread."""
        return TensorReader(self.files, ranges=self.ranges)


class CheckedSource(TensorSource, frozen=True):
    """Files to read boxes of tensors from, with the checksums of the records that are read."""

    records: RecordCheck = field(default_factory=RecordCheck)

    def reader(self) -> TensorReader:
        """Return the reader for one thread, which notes what it reads of records."""
        return TensorReader(self.files, self.records.note, ranges=self.ranges)

    def problems(self, entries: Iterable[TensorEntry], workers: int) -> list[Problem]:
        """Return a problem for each record of these tensors that is not as it was written.

        Records of copies, and others that were not read completely, are read here. Raises Damaged
        if a file ends before a record does.
        """
        self.touch(entries)
        self.records.read_unseen(self.files, workers)
        return self.records.problems()

    def touch(self, entries: Iterable[TensorEntry]) -> None:
        """Note the records that tensors are made from."""
        for entry in entries:
            for place in places(replace(entry, chunks=tuple(map(open_chunk, entry.chunks)))):
                if isinstance(place, Extent) and place.record is not None:
                    self.records.touch(place.record, entry.name)


_PASSES = 16
"""Times as long as moving bytes that computing with them takes: while numpy or a hash computes,
other threads run.
"""


def tensor_job(
    entry: TensorEntry, limit: int | None = None, *, stored: bool = False
) -> Job[TensorEntry, TensorReader, TensorTile]:
    """Return the job that reads a whole tensor in row-major order; its chunks must tile it.

    Tiles have at most ``limit`` bytes, by default those that suit the source. Elements have the
    type that a rewrite requests, or are as ``stored``.
    """

    def runs(block: int) -> Iterator[Need]:
        return entry_needs(entry, _tiles_of(entry, limit or TILE), block)

    nbytes = entry.elements * entry.source_dtype.itemsize
    return Job(entry, partial(_read_tensor, entry, limit, stored), [runs], _PASSES * nbytes)


def _tiles_of(entry: TensorEntry, limit: int) -> Iterator[Box]:
    return tiles(Box.whole(entry.shape), entry.source_dtype.itemsize, limit)


def _read_tensor(
    entry: TensorEntry, limit: int | None, stored: bool, reader: TensorReader
) -> Iterator[TensorTile]:
    itemsize, gatherer = entry.source_dtype.itemsize, reader.elements
    read = gatherer.read_stored if stored else gatherer.read_values
    for box in _tiles_of(entry, limit or reader.policy.tile):
        yield TensorTile(box, read(entry, box), box.volume * itemsize)


def place_job(
    entry: TensorEntry, at: Place, shape: tuple[int, ...], limit: int
) -> Job[TensorEntry, TensorReader, TensorTile]:
    """Return the job that reads the elements at one place, of ``shape``, as stored."""

    whole, dtype = Box.whole(shape), entry.source_dtype

    def read(reader: TensorReader) -> Iterator[TensorTile]:
        from ckptool.engine.read.gather import array

        for box in tiles(whole, dtype.itemsize, limit):
            values = array(box.shape, dtype, memoryview(b""))
            reader.elements.fill_from(at, values, box, dtype)
            yield TensorTile(box, values, values.nbytes)

    def runs(block: int) -> Iterator[Need]:
        for box in tiles(whole, dtype.itemsize, limit):
            yield from place_needs(at, box, dtype.itemsize, block)

    return Job(entry, read, [runs])


_FILL = 16 << 20
"""Bytes read into memory at a time, unless one element is larger: of half as many, threads that
copy to a GPU wait for the GIL more often, and 16 of them are slower than 8.
"""
_FETCHED = 8 << 20
"""The same of a store, whose ranges are as large: with larger ones more are kept at a time."""


class BoxMemory(Protocol):
    """Where the elements of a box go, bit by bit."""

    def part(self, where: Box) -> AbstractContextManager[Array]:
        """Return an array to fill for a part of the box, in coordinates that begin at 0."""


class ArrayMemory(Struct, frozen=True):
    """A numpy array of the box's shape, of elements as bits (``gather.unit``), strided or not."""

    values: Array

    def part(self, where: Box) -> AbstractContextManager[Array]:
        """Return the array's own elements."""
        from ckptool.engine.read.numbers import part_of

        return nullcontext(part_of(self.values, where))


class FillRequest(NamedTuple):
    """``box`` of a tensor, which its chunks must cover, goes to ``memory``."""

    entry: TensorEntry
    box: Box
    memory: BoxMemory


def fill(requests: Sequence[FillRequest], source: Files, workers: int) -> None:
    """Read every box into its memory, from the files of its source; chunks must be located.

    A record that is read completely is compared with the checksum that its writer stored; one that
    is read in part is not. Raises Damaged if one differs or a file ends early: the memory then
    contains what was read.
    """
    limit = _FETCHED if source.policy.by_request else _FILL
    # shared: of a record that boxes need in part the rest is not read for its checksum
    records, jobs = RecordCheck(shared=True), list(_fill_jobs(requests, limit))
    checked = CheckedSource(source, records=records)
    read_tiles(checked, jobs, _exhaust, max(1, min(workers, len(jobs))))
    checked.touch(request.entry for request in requests)
    require_intact(records.problems())


def _fill_jobs(
    requests: Sequence[FillRequest], limit: int
) -> Iterator[Job[FillRequest, TensorReader, TensorTile]]:
    """Yield the tiles of all boxes in the files' order; those of one blob are one thread's."""
    placed = sorted(((*_first_spot(request), at) for at, request in enumerate(requests)))
    for *_, at in placed:
        request = requests[at]
        itemsize = max(request.entry.source_dtype.itemsize, request.entry.dtype.itemsize)
        cut = tiles(request.box, itemsize, limit)
        stored = (at for chunk in request.entry.chunks for at in stored_places(chunk.at))
        is_packed = any(isinstance(at, EncodedBlob) for at in stored)
        for boxes in [list(cut)] if is_packed else ([box] for box in cut):
            runs = partial(entry_needs, request.entry, boxes)
            yield Job(request, partial(_fill_boxes, request, boxes), [runs])


def _exhaust(request: FillRequest, filled: Iterator[TensorTile]) -> None:
    """Read all tiles: reading puts them in place."""
    deque(filled, maxlen=0)


def _first_spot(request: FillRequest) -> tuple[str, int]:
    """Return where the first bytes of a box are: file and offset."""
    spots = [
        (overlap.chunk.at.file, overlap.chunk.at.offset)
        for overlap in ChunkIndex(request.entry).find(request.box)
    ]
    return min(spots, default=("", 0))


def _fill_boxes(
    request: FillRequest, boxes: Sequence[Box], reader: TensorReader
) -> Iterator[TensorTile]:
    """Yield tiles that are read directly into their memory."""
    entry, whole, memory = request
    gatherer = reader.elements
    for box in boxes:
        with memory.part(box.relative_to(whole.lo)) as out:
            if entry.source_dtype == entry.dtype:
                gatherer.gather_into(out, entry, box)
            else:
                out[...] = gatherer.read_values(entry, box)
        yield TensorTile(box, out, box.volume * entry.source_dtype.itemsize)
