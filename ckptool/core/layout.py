"""The output of a writer, known to the byte before one byte is moved."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from msgspec import Struct, field

from ckptool.core.box import Box, Piece, row_major_strides
from ckptool.core.catalog import Chunk, Extent, TensorEntry, merge_copies
from ckptool.core.chunks import Run, RunChunks


class Data(Struct, frozen=True):
    """The C-ordered image of a local tensor of ``shape`` made of ``pieces`` of the tensor ``name``.

    Its elements have ``itemsize`` bytes.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    itemsize: int

    @classmethod
    def of(cls, name: str, box: Box, itemsize: int) -> Data:
        """Return the image of one box."""
        pieces = _only_piece(box)
        return cls(name, pieces[0].local.hi, pieces, itemsize)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@lru_cache(maxsize=1024)
def _only_piece(box: Box) -> tuple[Piece]:
    """Return a box as the only piece of a part: the same of tensors that are cut alike."""
    return (Piece(box, Box.whole(box.shape)),)


class Patch(NamedTuple):
    """Four bytes at ``at`` of a literal: the little-endian CRC-32 of another part of the file.

    They are 0 in the literal. The other part comes ``distance`` parts before it: a store is written
    from beginning to end, and the literals of archives that are alike are the same.
    """

    at: int
    distance: int


class Literal(Struct, frozen=True):
    """Bytes the writer knows: headers, pickles, zip records, padding."""

    data: bytes
    patches: tuple[Patch, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.data)


class Verbatim(Struct, frozen=True):
    """A whole file of the source, unchanged."""

    file: str
    nbytes: int


Part = Data | Literal | Verbatim


class FileLayout:
    """One output file: its path relative to the target folder, and its parts in order.

    ``rank`` is the rank whose data it holds, None if it belongs to all. Files with the same
    ``unit`` are made of the same rows of the source: one process writes them. A format that may cut
    tensors into millions of chunks has a class of its own, which makes the parts on each access.
    """

    __slots__ = ("_parts", "nbytes", "path", "rank", "unit")

    def __init__(
        self,
        path: str,
        parts: Sequence[Part],
        rank: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        self.path = path
        self.rank = rank
        self.unit: object = path
        self.nbytes = sum(part.nbytes for part in parts) if nbytes is None else nbytes
        self._parts = (*parts,)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._parts

    @property
    def decisive(self) -> Iterable[Part]:
        """Parts that identify the non-tensor content of the file.

        These parts themselves or, if they are large, the data from which ckptool makes them.
        """
        return self.parts

    def within(self, folder: str) -> FileLayout:
        """Return the file in a folder of the target."""
        file = copy(self)
        file.path, file.unit = f"{folder}/{self.path}", (folder, self.unit)
        return file


class WrittenCut(Struct, frozen=True, eq=False, dict=True):
    """How tensors that are written alike are cut: each box, and its file and rank.

    No box occurs twice.
    """

    boxes: Sequence[Box]
    files: Sequence[tuple[str, int]]

    @cached_property
    def volumes(self) -> list[int]:
        """The number of elements of each box."""
        return [box.volume for box in self.boxes]

    def places(self, paths: Collection[str]) -> list[int]:
        """Return the numbers of the boxes that are in the files ``paths``."""
        return [at for at, (path, _) in enumerate(self.files) if path in paths]


class WrittenChunks(RunChunks):
    """Where one tensor is written: ``offsets`` is a numpy array of the byte where each box begins.

    Tensors that are written alike share the ``cut``. A box is C-ordered, of elements of
    ``itemsize`` bytes. Each becomes a ``Chunk`` on access.
    """

    __slots__ = ("cut", "itemsize", "offsets")
    cut: WrittenCut
    alone = True

    def __init__(self, cut: WrittenCut, offsets: Any, itemsize: int) -> None:
        self.cut = cut
        self.offsets = offsets
        self.itemsize = itemsize

    @property
    def boxes(self) -> Sequence[Box]:
        """The boxes of all chunks."""
        return self.cut.boxes

    def __len__(self) -> int:
        return len(self.cut.boxes)

    def runs(self) -> Iterator[Run]:
        """Yield the file, the offset and the bytes of each chunk; none is a record."""
        cut, size = self.cut, self.itemsize
        for (path, _), at, count in zip(cut.files, self.offsets.tolist(), cut.volumes, strict=True):
            yield path, at, count * size, None

    def make(self, at: int) -> Chunk:
        """Return the chunk of this number."""
        box, (path, rank) = self.cut.boxes[at], self.cut.files[at]
        strides = row_major_strides(box.shape, self.itemsize)
        return Chunk(box, Extent(path, int(self.offsets[at]), strides), rank)


class Layout(Struct, frozen=True):
    """All output files. The last one commits: an index or ``.metadata``.

    ``folder`` says whether the target is a folder or the single file ``files[-1]`` (and its side
    files). ``notes`` name what the target format cannot hold unchanged. ``rows`` says how many rows
    of a tensor are written, if its last rows are dropped. ``tables`` say where each tensor is
    written, as the parts of the files do; None if only these do.
    """

    files: tuple[FileLayout, ...]
    folder: bool
    notes: tuple[str, ...] = field(default=())
    rows: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, WrittenChunks] | None = None

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def sizes(self) -> dict[str, int]:
        """The files by their paths, with their sizes in bytes."""
        return {file.path: file.nbytes for file in self.files}


def tiles(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut a box into boxes that are contiguous ranges of its C-ordered image, in order.

    Each holds at most ``limit`` bytes, as long as one element does.
    """
    volume = box.volume
    if not volume:
        return
    if volume * itemsize <= limit:
        yield box
    else:
        yield from _cut(box, itemsize, limit)


def _cut(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Yield the tiles of a box that is larger than one tile, as ``tiles`` does."""
    shape = box.shape
    dim, inner = _split_dim(shape, itemsize, limit)
    step = max(1, limit // inner) if dim < len(shape) else 1
    for outer in itertools.product(*map(range, box.lo[:dim], box.hi[:dim])):
        if dim == len(shape):
            yield Box(outer, tuple(o + 1 for o in outer))
            continue
        for start in range(box.lo[dim], box.hi[dim], step):
            stop = min(start + step, box.hi[dim])
            lo = (*outer, start, *box.lo[dim + 1 :])
            hi = (*(o + 1 for o in outer), stop, *box.hi[dim + 1 :])
            yield Box(lo, hi)


def _split_dim(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, int]:
    """Return the outermost dim of which one step fits the limit, and the bytes of such a step."""
    for dim in range(len(shape)):
        inner = math.prod(shape[dim + 1 :]) * itemsize
        if inner <= limit:
            return dim, inner
    return len(shape), itemsize


def written_entries(layout: Layout, sources: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return where a layout puts tensors, as entries of its own output, replicas as copies.

    ``sources`` are the wanted ones of the entries that the layout was made from.
    """
    if layout.tables is not None:
        return _tabled_entries(layout, layout.tables, sources)
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for file in layout.files:
        offset = 0
        for part in file.parts:
            if isinstance(part, Data) and part.name in sources:
                chunks[part.name] += _written_chunks(file, offset, part)
            offset += part.nbytes
    entries = {}
    for name, written in chunks.items():
        source, merged = sources[name], merge_copies(written)
        entries[name] = TensorEntry(name, source.path, source.dtype, source.shape, merged)
    return entries


def _tabled_entries(
    layout: Layout, tables: Mapping[str, WrittenChunks], sources: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    paths = frozenset(layout.sizes)
    cuts: dict[WrittenCut, tuple[WrittenCut, list[int]]] = {}
    entries = {}
    for name, source in sources.items():
        table = tables.get(name)
        if table is None:
            continue
        if table.cut not in cuts:
            at = table.cut.places(paths)
            boxes, files = [table.cut.boxes[n] for n in at], [table.cut.files[n] for n in at]
            cuts[table.cut] = WrittenCut(boxes, files), at
        cut, at = cuts[table.cut]
        if at:
            chunks = table
            if len(at) < len(table):
                chunks = WrittenChunks(cut, table.offsets[at], table.itemsize)
            entries[name] = TensorEntry(name, source.path, source.dtype, source.shape, chunks)
    return entries


def _written_chunks(file: FileLayout, offset: int, part: Data) -> Iterator[Chunk]:
    strides = row_major_strides(part.shape, part.itemsize)
    for box, local in part.pieces:
        start = offset + sum(i * s for i, s in zip(local.lo, strides, strict=True))
        yield Chunk(box, Extent(file.path, start, strides), file.rank or 0)
