"""Read two tensors side by side, whatever their storage."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.casts import is_computed, is_in_order
from ckptool.core.catalog import TensorEntry
from ckptool.core.layout import tiles
from ckptool.engine.read.segments import entry_needs
from ckptool.engine.read.tensors import TensorReader, TensorSource
from ckptool.engine.read.tiles import LARGE, PAIR_TILE, Job
from ckptool.errors import CkptoolError
from ckptool.storage.files import TILE, Files

if TYPE_CHECKING:
    from ckptool.engine.read.numbers import Array

_TILES_PER_JOB = 3
"""Tiles that one job compares: threads share a pair of large tensors."""


class TensorPair(Struct, frozen=True):
    """Two tensors of one shape; ``is_cast`` rounds one of them to the other's coarser type.

    Only the ``boxes`` are compared; all elements if there are none.
    """

    one: TensorEntry
    other: TensorEntry
    is_cast: bool = False
    boxes: tuple[Box, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes that are read to compare the two."""
        return self.elements * self.itemsize

    @property
    def elements(self) -> int:
        """Return how many elements are compared."""
        return sum(box.volume for box in self.boxes) if self.boxes else self.one.elements

    @property
    def is_plain(self) -> bool:
        """Return whether both are compared as stored, without memory for casts.

        Computing a number of a quantized tensor takes some twenty times its bytes.
        """
        one, other = self.one, self.other
        is_same = one.source_dtype == one.dtype == other.dtype == other.source_dtype
        return is_same and not (is_computed(one) or is_computed(other))

    @property
    def itemsize(self) -> int:
        """Return the bytes that are read for an element of each."""
        return self.one.source_dtype.itemsize + self.other.source_dtype.itemsize


class Failure(NamedTuple):
    """The error of one of the two sides, 0 or 1."""

    side: int
    error: CkptoolError


class PairTile(Struct, frozen=True):
    """The elements of one box of a pair on both sides; ``nbytes`` is the count of bytes read.

    ``pair`` is None if all elements are the same. If a side cannot be read there is a ``failure``,
    and the rest of the job's boxes is not read.
    """

    nbytes: int
    pair: TensorPair | None = None
    box: Box = Box((), ())
    values: tuple[Array, Array] | None = None
    failure: Failure | None = None

    def require(self) -> tuple[TensorPair, Array, Array]:
        """Return the pair, and the elements of both sides; raises the error of one."""
        if self.failure is not None:
            raise self.failure.error
        if self.pair is None or self.values is None:
            raise TypeError("both sides are the same")
        return self.pair, *self.values


class SideReaders(NamedTuple):
    """The readers of the two sides for one thread."""

    one: TensorReader
    other: TensorReader

    def close(self) -> None:
        """Close all files."""
        for reader in self:
            reader.close()


PairJob = Job[None, SideReaders, PairTile]
"""Reads tiles of a pair, or of several, or what is no tensor's."""


class PairSource(Struct, frozen=True):
    """Both sides, to read from."""

    one: TensorSource
    other: TensorSource

    @property
    def sides(self) -> tuple[Files, Files]:
        """The files of either side."""
        return self.one.files, self.other.files

    def reader(self) -> SideReaders:
        """Return the readers for one thread."""
        return SideReaders(self.one.reader(), self.other.reader())


def pair_jobs(pairs: Iterable[TensorPair]) -> Iterator[PairJob]:
    """Yield jobs that read some tiles of a pair each, in row-major order.

    The chunks of every tensor must tile the part that is compared.
    """
    for pair in pairs:
        # about the bytes that a read of one side has; computing counts as many
        pieces = max(1, len(pair.one.chunks), len(pair.other.chunks))
        at_a_time = pair.nbytes // 2 // pieces if pair.is_plain else LARGE
        for boxes in tiles_of_jobs(pair):
            runs = [partial(entry_needs, entry, boxes) for entry in (pair.one, pair.other)]
            yield Job(None, partial(read_both, pair, boxes), runs, at_a_time)


def tiles_of_jobs(pair: TensorPair) -> Iterator[list[Box]]:
    """Yield the tiles of each job of a pair: adjoining elements, in row-major order."""
    itemsize = max(pair.one.source_dtype.itemsize, pair.other.source_dtype.itemsize)
    parts = pair.boxes or (Box.whole(pair.one.shape),)
    limit = PAIR_TILE if pair.is_plain else TILE
    boxes = chain.from_iterable(tiles(part, itemsize, limit) for part in parts)
    at_once = is_in_order(pair.one) or is_in_order(pair.other)
    while batch := list(islice(boxes, None if at_once else _TILES_PER_JOB)):
        yield batch


def read_both(pair: TensorPair, boxes: Sequence[Box], readers: SideReaders) -> Iterator[PairTile]:
    """Read boxes of both tensors as elements.

    The first failure is the last tile: it counts the bytes of all boxes that are left.
    """
    sizes = [box.volume * pair.itemsize for box in boxes]
    for at, box in enumerate(boxes):
        sides: list[Array] = []
        for side, entry in enumerate((pair.one, pair.other)):
            try:  # in the memory of its side's reader: the other side leaves it as it is
                sides.append(readers[side].elements.read_values(entry, box))
            except CkptoolError as error:
                yield PairTile(sum(sizes[at:]), pair, box, failure=Failure(side, error))
                return
        yield PairTile(sizes[at], pair, box, (sides[0], sides[1]))


def same_bits(one: Array, other: Array) -> bool:
    """Return whether two C-ordered arrays of one size hold the same bytes."""
    return not _memcmp(one.ctypes.data, other.ctypes.data, one.nbytes)


# without the GIL, and without the array of answers that numpy fills
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
