"""How the chunks of all tensors are cut for a DCP folder, and their places in its files.

A checkpoint may be cut into millions of chunks. So an archive's frame is made once for each element
type and chunk shape, tensors that are cut alike share their boxes, and a file's parts are assembled
only when the file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, Literal, Part, WrittenChunks, WrittenCut
from ckptool.serialization.archive.write import lay_out_archive
from ckptool.serialization.pickle.write import TensorRef


def data_file(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"__{rank}_0.distcp"


class ItemBoxes(Struct, frozen=True):
    """The cuts of similar tensors: boxes, the rank that writes each, its bytes.

    ``archives`` are the parts of a box's archive, ``starts`` is where in it its elements begin, and
    ``frames`` all other bytes of it.
    """

    boxes: tuple[Box, ...]
    archives: tuple[Sequence[Part], ...]
    ranks: Any
    lengths: Any
    starts: Any
    frames: tuple[bytes, ...]
    lows: Any

    @classmethod
    def of(cls, entry: TensorEntry, boxes: Mapping[Box, int]) -> ItemBoxes:
        """Return how a tensor is cut."""
        import numpy as np

        frames = [_frame(entry.dtype.name, box.shape) for box in boxes]
        lengths, starts = (np.array([f[at] for f in frames], np.int64) for at in (1, 2))
        lows = np.array([box.lo for box in boxes], np.int64).reshape(len(boxes), len(entry.shape))
        ranks = np.array([*boxes.values()], np.int32)
        archives, others = tuple(frame[0] for frame in frames), tuple(frame[3] for frame in frames)
        return cls((*boxes,), archives, ranks, lengths, starts, others, lows)


class WrittenItems:
    """The chunks of all tensors, in columns: the rank's file and place of each.

    ``values`` are the bytes of rank 0's file before any chunk.
    """

    def __init__(self, tensors: Sequence[tuple[TensorEntry, ItemBoxes]], values: int) -> None:
        import numpy as np

        self.tensors = tensors
        cuts = [cut for _, cut in tensors]
        none = np.zeros(0, np.int32)
        self.ranks = np.concatenate([none, *(cut.ranks for cut in cuts)])
        self.lengths = np.concatenate([none, *(cut.lengths for cut in cuts)])
        counts = [len(cut.ranks) for cut in cuts]
        self.firsts = np.cumsum([0, *counts])
        self._order = np.argsort(self.ranks, kind="stable")
        lengths = self.lengths[self._order]
        ends = np.cumsum(lengths)
        world = int(self.ranks.max(initial=0)) + 1
        self._edges = np.searchsorted(self.ranks[self._order], np.arange(world + 1))
        before = np.concatenate([[0], ends])[self._edges]
        self.nbytes = np.diff(before)
        self.nbytes[0] += values
        begins = ends - lengths - np.repeat(before[:-1], np.diff(self._edges))
        self.offsets = np.empty(len(ends), np.int64)
        self.offsets[self._order] = begins
        self.offsets[self.ranks == 0] += values

    @property
    def written(self) -> list[int]:
        """The ranks that have a chunk."""
        import numpy as np

        return [int(rank) for rank in np.flatnonzero(np.diff(self._edges))]

    def tables(self) -> dict[str, WrittenChunks]:
        """Return the places of the elements of each tensor."""
        cuts: dict[int, WrittenCut] = {}
        tables = {}
        for (entry, cut), first in zip(self.tensors, self.firsts.tolist(), strict=False):
            if id(cut) not in cuts:
                files = [(data_file(rank), rank) for rank in cut.ranks.tolist()]
                cuts[id(cut)] = WrittenCut(cut.boxes, files)
            offsets = self.offsets[first : first + len(cut.boxes)] + cut.starts
            tables[entry.name] = WrittenChunks(cuts[id(cut)], offsets, entry.dtype.itemsize)
        return tables

    def decisive(self) -> Iterator[bytes]:
        """Yield what decides the file and place of each chunk, and the bytes around it."""
        numbers: dict[int, int] = {}
        for _, cut in self.tensors:
            if id(cut) not in numbers:
                numbers[id(cut)] = len(numbers)
                frames = b"".join(dict.fromkeys(cut.frames))
                columns = (cut.lows, cut.ranks, cut.lengths, cut.starts)
                yield repr((cut.lows.shape, len(frames))).encode()
                yield from (column.tobytes() for column in columns)
                yield frames
        for entry, cut in self.tensors:
            kind = entry.name, entry.path, entry.shape, entry.dtype.name, numbers[id(cut)]
            yield repr(kind).encode()
        yield self.offsets.tobytes()

    def parts(self, rank: int, values: Sequence[Part]) -> tuple[Part, ...]:
        """Return all parts of a rank's file, made on each call: its ``values``, then its chunks."""
        parts = list(values)
        for number, place in self._rows(rank):
            entry, cut = self.tensors[number]
            data = Data(entry.name, cut.boxes[place], entry.dtype.itemsize)
            parts += [data if type(part) is Data else part for part in cut.archives[place]]
        return tuple(parts)

    def _rows(self, rank: int) -> Iterator[tuple[int, int]]:
        """Return the chunks of a rank's file, in order: the number of the tensor, and the box's."""
        import numpy as np

        rows = self._order[self._edges[rank] : self._edges[rank + 1]]
        numbers = np.searchsorted(self.firsts, rows, side="right") - 1
        return zip(numbers.tolist(), (rows - self.firsts[numbers]).tolist(), strict=True)


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> tuple[list[Part], int, int, bytes]:
    """Return the archive of any tensor of this type and shape: its parts, and its size in bytes.

    Then the offset of the elements in it, and its bytes before and after them.
    """
    stand_in = TensorEntry("", (), BY_NAME[dtype], shape, ())
    parts = lay_out_archive(TensorRef.whole(stand_in))
    first = next(at for at, part in enumerate(parts) if isinstance(part, Data))
    start = sum(part.nbytes for part in parts[:first])
    frame = b"".join(part.data for part in parts if isinstance(part, Literal))
    return parts, sum(part.nbytes for part in parts), start, frame
