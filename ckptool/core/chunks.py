"""Containers of the chunks of a tensor: as they are, as columns, opened late, or as one place.

A checkpoint of thousands of ranks has millions of chunks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, starmap
from operator import eq
from typing import Any, NamedTuple, TypeVar

from ckptool.core.box import Box, BoxTable, LazySequence, row_major_strides
from ckptool.core.catalog import Chunk, Container, Extent, Place, Record, TensorEntry

_T = TypeVar("_T")


class Spans(NamedTuple):
    """A geometry: boxes, and the ranks that wrote them; equal for tensors that are cut alike."""

    boxes: Sequence[Any]
    ranks: tuple[int | None, ...]


class Chunks(Sequence[Chunk]):
    """The chunks of a tensor, and answers about all of them, each in its cheapest way.

    They are ``plain`` if they are known to be stored as they are, without a codec or a copy;
    ``bare`` if, besides, there is only one, all of the tensor, without a record; ``alone`` if no
    chunk shares its record or item with another, or has a copy.
    """

    __slots__ = ()
    plain = False
    bare = False
    alone = False

    @property
    def boxes(self) -> Sequence[Box]:
        """The boxes of all chunks."""
        return [chunk.box for chunk in self]

    @property
    def ranks(self) -> Sequence[int | None]:
        """The rank that wrote each chunk, None if that is not known."""
        return [chunk.rank for chunk in self]

    @property
    def spans(self) -> Spans:
        """The boxes of chunks and of their copies, with the rank that wrote each."""
        stored = [(chunk.box, chunk.rank) for chunk in self]
        stored += [(chunk.box, copy.rank) for chunk in self for copy in chunk.copies]
        return Spans(tuple(box for box, _ in stored), tuple(rank for _, rank in stored))

    @property
    def cut(self) -> object:
        """A key shared by the chunks of tensors with the same boxes in the same files."""
        return tuple((chunk.box, chunk.at.file) for chunk in self)

    @property
    def opened(self) -> Iterable[Chunk]:
        """The chunks that are open: all but those that are opened later."""
        return self

    @property
    def located(self) -> bool:
        """Whether it is known where elements are, or will be on access."""
        return any(isinstance(chunk.at, Extent) for chunk in self)

    @property
    def extent(self) -> tuple[str, int, tuple[int, ...]] | None:
        """File, offset and strides of the whole tensor if that is all there is to know of it."""
        return None


class LazyChunks(LazySequence[Chunk], Chunks):
    """Chunks without copies that are made on access, each by its number."""

    __slots__ = ()

    @property
    def spans(self) -> Spans:
        """The boxes of chunks, with the rank that wrote each."""
        return Spans(self.boxes, tuple(self.ranks))

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.make, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(map(eq, self, other))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


Run = tuple[str, int, int, Record | None]
"""Bytes of a file: its name, where they begin, and how many; and the record that they are."""


class RunChunks(LazyChunks):
    """Chunks of which each is one run of bytes, of elements as they are, in row-major order."""

    __slots__ = ()
    plain = True

    @abstractmethod
    def runs(self) -> Iterator[Run]:
        """Yield the file, the offset and the bytes of each chunk, and the record that it is."""


class PlainChunks(tuple[Chunk, ...], Chunks):
    """Chunks as they are."""

    __slots__ = ()


def chunks_of(entry: TensorEntry) -> Chunks:
    """Return the container of a tensor's chunks."""
    chunks = entry.chunks
    return chunks if isinstance(chunks, Chunks) else PlainChunks(chunks)


class ItemTable(LazySequence[Container]):
    """Items in files: the number of each one's file, its offset and its bytes, as numpy arrays."""

    __slots__ = ("file_numbers", "files", "lengths", "offsets")

    def __init__(self, files: Sequence[str], file_numbers: Any, offsets: Any, lengths: Any) -> None:
        self.files = files
        self.file_numbers = file_numbers
        self.offsets = offsets
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.offsets)

    def make(self, at: int) -> Container:
        """Return the item of this number; IndexError if there is none."""
        file = self.files[self.file_numbers[at]]
        return Container(file, int(self.offsets[at]), int(self.lengths[at]))

    def make_slice(self, at: slice) -> ItemTable:
        """Return the items of a slice, as views of the columns."""
        return ItemTable(self.files, self.file_numbers[at], self.offsets[at], self.lengths[at])

    def __iter__(self) -> Iterator[Container]:
        return starmap(Container, self.spans())

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Return the file, the offset and the bytes of each item."""
        files = map(self.files.__getitem__, self.file_numbers.tolist())
        return zip(files, self.offsets.tolist(), self.lengths.tolist(), strict=True)


class ChunkTable(LazyChunks):
    """Chunks with their boxes and items in columns; each becomes a ``Chunk`` on access.

    Tensors that are cut alike share ``boxes``. ``file_ranks`` are the ranks that wrote the items'
    files. No two chunks have the same box.
    """

    __slots__ = ("boxes", "file_ranks", "items")
    boxes: BoxTable
    alone = True
    located = False

    def __init__(self, boxes: BoxTable, items: ItemTable, file_ranks: Sequence[int | None]) -> None:
        self.boxes = boxes
        self.items = items
        self.file_ranks = file_ranks

    @property
    def cut(self) -> object:
        """The key shared by all tables with the same boxes in the same files."""
        return self.boxes, tuple(map(self.items.files.__getitem__, self.items.file_numbers))

    @property
    def begin(self) -> tuple[str, int]:
        """The file of the first chunk's item, and where that begins."""
        items = self.items
        return items.files[items.file_numbers[0]], int(items.offsets[0])

    @property
    def ranks(self) -> list[int | None]:
        """The rank that wrote each chunk, None if that is not known."""
        return [self.file_ranks[number] for number in self.items.file_numbers.tolist()]

    def __len__(self) -> int:
        return len(self.boxes)

    def make(self, at: int) -> Chunk:
        """Return the chunk of this number."""
        rank = self.file_ranks[self.items.file_numbers[at]]
        return Chunk(self.boxes[at], self.items[at], rank)

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk, self.boxes, self.items, self.ranks)

    def __hash__(self) -> int:
        return hash(self.boxes)


class RecordTable(ChunkTable, RunChunks):
    """Chunks of a table, of which each is a whole record of its item.

    They begin at ``offsets`` of the items' files, and have the CRC-32 ``crcs``: numpy arrays.
    """

    __slots__ = ("crcs", "itemsize", "offsets")
    located = True

    def __init__(self, closed: ChunkTable, offsets: Any, crcs: Any, itemsize: int) -> None:
        super().__init__(closed.boxes, closed.items, closed.file_ranks)
        self.offsets = offsets
        self.crcs = crcs
        self.itemsize = itemsize

    def runs(self) -> Iterator[Run]:
        """Yield the file, the offset and the bytes of each chunk, and the record that it is."""
        columns = self.offsets, self.boxes.volumes * self.itemsize, self.crcs
        files = [*map(self.items.files.__getitem__, self.items.file_numbers.tolist())]
        offsets, sizes, crcs = (column.tolist() for column in columns)
        return zip(files, offsets, sizes, map(Record, files, offsets, sizes, crcs), strict=True)

    def make(self, at: int) -> Chunk:
        """Return the chunk of this number."""
        closed = super().make(at)
        file, start, shape = closed.at.file, int(self.offsets[at]), closed.box.shape
        record = Record(file, start, closed.box.volume * self.itemsize, int(self.crcs[at]))
        place = Extent(file, start, row_major_strides(shape, self.itemsize), record)
        return Chunk(closed.box, place, closed.rank)

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.make, range(len(self)))


class LateChunks(ChunkTable):
    """Chunks of a table, of which ``open_chunk`` makes each on first access, and that is kept.

    Before that it is a whole item of its own. ``opened`` are those that were made, by index.
    """

    __slots__ = ("_opened", "open_chunk")
    located = True

    def __init__(
        self,
        closed: ChunkTable,
        open_chunk: Callable[[Chunk], Chunk],
        opened: dict[int, Chunk] | None = None,
    ) -> None:
        super().__init__(closed.boxes, closed.items, closed.file_ranks)
        self.open_chunk = open_chunk
        self._opened = opened or {}

    @property
    def opened(self) -> Iterable[Chunk]:
        """The chunks that are open so far."""
        return self._opened.values()

    def make(self, at: int) -> Chunk:
        """Return the chunk of this number, opened; the same one to all threads."""
        chunk = self._opened.get(at)
        if chunk is None:
            at = range(len(self))[at]
            chunk = self._opened.get(at)
        return chunk or self._opened.setdefault(at, self.open_chunk(super().make(at)))

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.make, range(len(self)))


class WholeTensor(LazyChunks):
    """The only chunk of a tensor that is stored as it is in a file, made on access.

    Tensors of one shape share ``boxes``, the one box that each of them is.
    """

    __slots__ = ("_chunk", "boxes", "file", "offset", "strides")
    boxes: tuple[Box]
    plain = True
    bare = True
    alone = True
    located = True

    def __init__(self, boxes: tuple[Box], file: str, offset: int, strides: tuple[int, ...]) -> None:
        self.boxes = boxes
        self.file = file
        self.offset = offset
        self.strides = strides
        self._chunk: Chunk | None = None

    @property
    def extent(self) -> tuple[str, int, tuple[int, ...]]:
        """File, offset and strides."""
        return self.file, self.offset, self.strides

    @property
    def begin(self) -> tuple[str, int]:
        """The file of its first byte, and where that is in it."""
        return self.file, self.offset

    @property
    def cut(self) -> object:
        """The key shared by all tensors of one shape in one file."""
        return self.boxes, self.file

    def __len__(self) -> int:
        return 1

    def make(self, at: int) -> Chunk:
        """Return the chunk, the only one."""
        if self._chunk is None:
            place = Extent(self.file, self.offset, self.strides)
            self._chunk = Chunk(self.boxes[0], place)
        return (self._chunk,)[at]


class Joined(LazySequence[_T]):
    """Concatenated sequences, as one."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Sequence[_T]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def make(self, at: int) -> _T:
        """Return the element of this number; IndexError if there is none."""
        return tuple(self)[at]

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self._parts)


def proved_equal(first: Place, second: Place) -> bool:
    """Return whether the checksums that their writers recorded prove two places equal."""
    spans = []
    for at in (first, second):
        if not isinstance(at, Extent) or at.record is None:
            return False
        record = at.record
        spans.append((record.crc32, record.nbytes, at.offset - record.offset, at.strides, at.ops))
    return spans[0] == spans[1]
