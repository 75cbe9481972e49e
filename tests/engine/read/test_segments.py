"""What is announced for elements is what is read for them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from trials import trials

from ckptool.core.box import Box, BoxTable, row_major_strides
from ckptool.core.catalog import Chunk, Extent, Record, TensorEntry
from ckptool.core.chunks import ChunkTable, ItemTable, RecordTable
from ckptool.core.dtype import BY_NAME
from ckptool.engine.read.gather import unit
from ckptool.engine.read.segments import (
    Segment,
    cut_out,
    place_needs,
    segments_of_tensor,
)
from ckptool.engine.read.tensors import TensorReader
from ckptool.storage.files import ReadPolicy
from ckptool.storage.local import LocalReader, LocalSource

SIZE = 1 << 16


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """Strides that grow in any order of the dims, with gaps, and a box of their elements."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    strides, step = [0] * len(shape), 4
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step * draw(st.sampled_from([1, 1, 2, 5]))
        step = strides[dim] * shape[dim]
    spans = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return tuple(strides), Box(*zip(*spans, strict=True))


@given(strided(), st.sampled_from([1, 16, 64, 4096]))
@example(((20_000, 4), Box((0, 0), (3, 2))), 1)  # rows too far apart to be read as one
@settings(max_examples=trials(60))
def test_what_is_announced_is_what_is_read(found: tuple[tuple[int, ...], Box], block: int) -> None:
    """Of a store, where a read costs a block, and of a disk, where it costs no more than a byte."""
    strides, box = found
    at, dtype = Extent("f", 8, strides), BY_NAME["float32"]
    read: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        Path(folder, "f").write_bytes(bytes(SIZE))
        real = LocalReader.read_into

        def read_into(self: LocalReader, file: str, offset: int, buffer: memoryview) -> None:
            read.append((file, offset, len(buffer)))
            real(self, file, offset, buffer)

        def read_runs(
            self: LocalReader, file: str, offset: int, step: int, runs: list[memoryview]
        ) -> None:
            for number, run in enumerate(runs):
                read_into(self, file, offset + number * step, run)

        patch.setattr(LocalReader, "read_into", read_into)
        patch.setattr(LocalReader, "read_runs", read_runs)
        source = LocalSource(Path(folder), {})
        source.policy = ReadPolicy(block=block)
        with closing(TensorReader(source)) as reader:
            reader.elements.fill_from(at, np.zeros(box.shape, unit(4)), box, dtype)
    announced: list[Any] = list(place_needs(at, box, 4, block))
    assert sorted(announced) == sorted(read)


ROWS = [Box((4, 0), (6, 3)), Box((0, 0), (1, 3)), Box((1, 0), (4, 3)), Box((4, 0), (4, 3))]


def tensor(boxes: list[Box]) -> TensorEntry:
    places = [Extent(f"f{n}", 10, row_major_strides(box.shape, 1)) for n, box in enumerate(boxes)]
    chunks = tuple(map(Chunk, boxes, places))
    return TensorEntry("t", ("t",), BY_NAME["uint8"], (6, 3), chunks)


def test_rows_in_any_order_are_segments_of_their_tensor_in_order() -> None:
    assert segments_of_tensor(tensor(ROWS)) == [
        Segment("f1", 10, 3, None, 0),
        Segment("f2", 10, 9, None, 3),
        Segment("f0", 10, 6, None, 12),
    ]


@pytest.mark.parametrize(
    "boxes",
    [ROWS[:2], [Box((0, 0), (6, 1)), Box((0, 1), (6, 3))]],
    ids=["not all rows", "columns"],
)
def test_a_tensor_that_is_not_whole_rows_has_no_segments(boxes: list[Box]) -> None:
    assert segments_of_tensor(tensor(boxes)) is None


def test_the_rows_of_a_table_of_records_are_its_runs_in_order() -> None:
    lows, highs = (np.array([getattr(box, side) for box in ROWS]) for side in ("lo", "hi"))
    items = ItemTable(["f", "g"], np.array([0, 1, 0, 0]), np.arange(4), np.full(4, 99))
    closed = ChunkTable(BoxTable(lows, highs), items, [0, 1])
    table = RecordTable(closed, np.array([90, 10, 20, 5]), np.array([7, 8, 9, 0]), 1)
    found = segments_of_tensor(replace(tensor(ROWS), chunks=table))
    records = Record("g", 10, 3, 8), Record("f", 20, 9, 9), Record("f", 90, 6, 7)
    skips = zip(records, (0, 3, 12), strict=True)
    assert found == [Segment(*record[:3], record, skip) for record, skip in skips]
    assert segments_of_tensor(replace(tensor(ROWS), chunks=(*table,))) == found


def test_bytes_are_cut_out_of_segments() -> None:
    segments = segments_of_tensor(tensor(ROWS)) or []
    assert list(cut_out(segments, 2, 11)) == [
        Segment("f1", 12, 1, None, 0),
        Segment("f2", 10, 9, None, 1),
        Segment("f0", 10, 1, None, 10),
    ]
    assert list(cut_out(segments, 12, 6)) == [Segment("f0", 10, 6, None, 0)]
