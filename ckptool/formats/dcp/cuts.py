"""How the chunks of all tensors are cut for a DCP folder, and their places in its files.

A checkpoint may be cut into millions of chunks. So an archive's frame is made once for each element
type and chunk shape, tensors that are cut alike share their boxes, and a file's parts are assembled
only when the file is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, FileLayout, Literal, Part, WrittenChunks, WrittenCut
from ckptool.serialization.archive.write import lay_out_archive
from ckptool.serialization.pickle.write import TensorRef


class ItemBoxes(Struct, frozen=True):
    """The cuts of similar tensors: boxes, the rank that writes each, and the bytes of its archive.

    ``frames`` are what a box's archive has before its elements and after them, ``starts`` is where
    these begin in it.
    """

    boxes: tuple[Box, ...]
    frames: tuple[tuple[Literal, Literal], ...]
    ranks: Any
    lengths: Any
    starts: Any
    lows: Any

    @classmethod
    def of(cls, entry: TensorEntry, boxes: Mapping[Box, int]) -> ItemBoxes:
        """Return how a tensor is cut."""
        import numpy as np

        frames = tuple(_frame(entry.dtype.name, box.shape) for box in boxes)
        starts = np.array([head.nbytes for head, _ in frames], np.int64)
        ends = np.array([tail.nbytes for _, tail in frames], np.int64)
        sizes = [box.volume * entry.dtype.itemsize for box in boxes]
        lengths = starts + np.array(sizes, np.int64) + ends
        lows = np.array([box.lo for box in boxes], np.int64).reshape(len(boxes), len(entry.shape))
        ranks = np.array([*boxes.values()], np.int32)
        return cls((*boxes,), frames, ranks, lengths, starts, lows)


class FileSplit(Struct, frozen=True):
    """``count`` files for each rank; ``numbers`` say which of them each tensor goes to.

    ``heads`` has the first of the ranks that need the same rows, for each rank that shares any. The
    files of all ranks are counted, those of rank 0 first.
    """

    count: int = 1
    numbers: Sequence[int] = ()
    heads: Mapping[int, int] = {}

    def path(self, file: int) -> str:
        """Return the name of a file."""
        rank, number = divmod(file, self.count)
        return f"__{rank}_{number}.distcp"

    def unit(self, file: int) -> tuple[int, int]:
        """Return the key shared by the files that are made of the same rows."""
        rank, number = divmod(file, self.count)
        return (rank, number) if self.count == 1 else (self.heads.get(rank, rank), number)


class WrittenItems:
    """The chunks of all tensors, in columns: the file and place of each.

    ``values`` are the bytes of the first file before any chunk.
    """

    def __init__(
        self, tensors: Sequence[tuple[TensorEntry, ItemBoxes]], values: int, split: FileSplit
    ) -> None:
        import numpy as np

        self.tensors = tensors
        self.split = split
        cuts = [cut for _, cut in tensors]
        none = np.zeros(0, np.int32)
        self.numbers = split.numbers or [0] * len(tensors)
        of_cuts = (cut.ranks * split.count + n for cut, n in zip(cuts, self.numbers, strict=True))
        self.files = np.concatenate([none, *of_cuts])
        self.lengths = np.concatenate([none, *(cut.lengths for cut in cuts)])
        counts = [len(cut.ranks) for cut in cuts]
        self.firsts = np.cumsum([0, *counts])
        self._order = np.argsort(self.files, kind="stable")
        lengths = self.lengths[self._order]
        ends = np.cumsum(lengths)
        count = int(self.files.max(initial=0)) + 1
        self._edges = np.searchsorted(self.files[self._order], np.arange(count + 1))
        file_starts = np.concatenate([[0], ends])[self._edges]
        self.nbytes = np.diff(file_starts)
        self.nbytes[0] += values
        begins = ends - lengths - np.repeat(file_starts[:-1], np.diff(self._edges))
        self.offsets = np.empty(len(ends), np.int64)
        self.offsets[self._order] = begins
        self.offsets[self.files == 0] += values

    @property
    def written(self) -> list[int]:
        """The files that have a chunk."""
        import numpy as np

        return [int(file) for file in np.flatnonzero(np.diff(self._edges))]

    def tables(self) -> dict[str, WrittenChunks]:
        """Return the places of the elements of each tensor."""
        cuts: dict[tuple[int, int], WrittenCut] = {}
        tables = {}
        tensors = zip(self.tensors, self.numbers, self.firsts.tolist(), strict=False)
        for (entry, cut), number, first in tensors:
            key, last = (id(cut), number), first + len(cut.boxes)
            if key not in cuts:
                files = zip(self.files[first:last].tolist(), cut.ranks.tolist(), strict=True)
                cuts[key] = WrittenCut(cut.boxes, [(self.split.path(n), rank) for n, rank in files])
            offsets = self.offsets[first:last] + cut.starts
            tables[entry.name] = WrittenChunks(cuts[key], offsets, entry.dtype.itemsize)
        return tables

    def decisive(self) -> Iterator[bytes]:
        """Yield what decides the file and place of each chunk, and the bytes around it."""
        numbers: dict[int, int] = {}
        for _, cut in self.tensors:
            if id(cut) not in numbers:
                numbers[id(cut)] = len(numbers)
                frames = b"".join(
                    [head.data + tail.data for head, tail in dict.fromkeys(cut.frames)]
                )
                columns = (cut.lows, cut.ranks, cut.lengths, cut.starts)
                yield repr((cut.lows.shape, len(frames))).encode()
                yield from (column.tobytes() for column in columns)
                yield frames
        for entry, cut in self.tensors:
            kind = entry.name, entry.path, entry.shape, entry.dtype.name, numbers[id(cut)]
            yield repr(kind).encode()
        yield self.files.tobytes()
        yield self.offsets.tobytes()

    def parts(self, file: int, values: Sequence[Part]) -> tuple[Part, ...]:
        """Return all parts of a file, made on each call: its ``values``, then its chunks.

        What is between the elements of two chunks is one literal, the same where archives are.
        """
        parts, between, last = [*values], dict[tuple[int, int], Literal](), Literal(b"")
        for number, place in self._rows(file):
            entry, cut = self.tensors[number]
            head, tail = cut.frames[place]
            key = id(last), id(head)
            if key not in between:
                between[key] = Literal(last.data + head.data, last.patches)
            parts += between[key], Data.of(entry.name, cut.boxes[place], entry.dtype.itemsize)
            last = tail
        return (*parts, last) if last.data else tuple(parts)

    def _rows(self, file: int) -> Iterator[tuple[int, int]]:
        """Return the chunks of a file, in order: the number of the tensor, and the box's."""
        import numpy as np

        rows = self._order[self._edges[file] : self._edges[file + 1]]
        numbers = np.searchsorted(self.firsts, rows, side="right") - 1
        return zip(numbers.tolist(), (rows - self.firsts[numbers]).tolist(), strict=True)


class ItemFile(FileLayout):
    """A file of items, by its number: those of ``values``, then those of chunks.

    Its parts are made on each access, so that a plan of millions of chunks stays small.
    """

    __slots__ = ("_items", "_number")

    def __init__(self, items: WrittenItems, number: int, values: Sequence[Part]) -> None:
        split = items.split
        rank, nbytes = number // split.count, int(items.nbytes[number])
        super().__init__(split.path(number), values, rank, nbytes)
        self.unit = split.unit(number)
        self._items, self._number = items, number

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._items.parts(self._number, self._parts)

    @property
    def decisive(self) -> Iterable[Part]:
        return self._parts


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> tuple[Literal, Literal]:
    """Return what the archive of any tensor of this type and shape has around its elements."""
    stand_in = TensorEntry("", (), BY_NAME[dtype], shape, ())
    head, tail = (p for p in lay_out_archive(TensorRef.whole(stand_in)) if isinstance(p, Literal))
    return head, tail
