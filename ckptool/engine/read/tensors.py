"""Read tensors tile by tile: what the one read loop reads where elements matter and not bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ckptool.core.box import Box
from ckptool.core.catalog import Extent, Place, Record, TensorEntry, places
from ckptool.core.dtype import DType
from ckptool.core.layout import tiles
from ckptool.engine.checksum import RecordCheck, crc32
from ckptool.engine.read.gather import Array, Gatherer, array
from ckptool.engine.read.tiles import Job
from ckptool.errors import Problem
from ckptool.storage.local import Files


class TensorTile(NamedTuple):
    """The elements of a box of a tensor, in an array of the box's shape.

    ``nbytes`` are those of the elements as they are stored.
    """

    box: Box
    values: Array
    nbytes: int


class PairTile(NamedTuple):
    """The elements of one box on two sides; ``nbytes`` are those that were read of both."""

    box: Box
    one: Array
    other: Array
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Files to read boxes of tensors from."""

    files: Files

    def reader(self) -> Gatherer:
        """Return what one thread reads with."""
        return Gatherer(self.files)


class CheckedSource:
    """Files to read boxes of tensors from, with the checksums of the records that are read."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._records = RecordCheck()

    def reader(self) -> Gatherer:
        """Return what one thread reads with."""
        return Gatherer(self.files, self._note)

    def problems(self, entries: Iterable[TensorEntry], workers: int) -> list[Problem]:
        """Return a problem for each record of these tensors that is not as it was written.

        Records of copies, and others that were not read whole, are read here. Raises Damaged where
        a file ends before a record does.
        """
        self._touch(entries)
        self._records.read_unseen(self.files, workers)
        return self._records.problems()

    def problems_so_far(self, entries: Iterable[TensorEntry]) -> list[Problem]:
        """As ``problems``, of the records that were read whole; nothing is read."""
        self._touch(entries)
        return self._records.problems(without=set(self._records.unseen()))

    def _touch(self, entries: Iterable[TensorEntry]) -> None:
        for entry in entries:
            for place in places(entry):
                if isinstance(place, Extent) and place.record is not None:
                    self._records.touch(place.record, entry.name)

    def _note(self, record: Record, offset: int, data: memoryview) -> None:
        self._records.piece(record, offset, len(data), crc32(data))


def tensor_job(
    entry: TensorEntry, limit: int | None = None, *, stored: bool = False
) -> Job[TensorEntry, Gatherer, TensorTile]:
    """Return the job that reads a whole tensor in row-major order; its chunks must tile it.

    Tiles have at most ``limit`` bytes, by default those that suit the source. Elements are of the
    type that a rewrite asks for, or as they are ``stored``.
    """
    return Job(entry, partial(_read_tensor, entry, limit, stored))


def _read_tensor(
    entry: TensorEntry, limit: int | None, stored: bool, gatherer: Gatherer
) -> Iterator[TensorTile]:
    itemsize = entry.source_dtype.itemsize
    read = gatherer.gathered if stored else gatherer.values
    for box in tiles(Box.whole(entry.shape), itemsize, limit or gatherer.tile):
        yield TensorTile(box, read(entry, box), box.volume * itemsize)


def place_job(
    entry: TensorEntry, at: Place, shape: tuple[int, ...], limit: int
) -> Job[TensorEntry, Gatherer, TensorTile]:
    """Return the job that reads the elements at one place, of ``shape``, as they are stored."""

    def read(gatherer: Gatherer) -> Iterator[TensorTile]:
        dtype = entry.source_dtype
        for box in tiles(Box.whole(shape), dtype.itemsize, limit):
            values = read_place(gatherer, at, box, dtype)
            yield TensorTile(box, values, values.nbytes)

    return Job(entry, read)


def read_place(gatherer: Gatherer, at: Place, box: Box, dtype: DType) -> Array:
    """Return a box of the elements at one place, in the coordinates of these."""
    values = array(box.shape, dtype, memoryview(b""))
    gatherer.fill_from(at, values, box, dtype)
    return values
