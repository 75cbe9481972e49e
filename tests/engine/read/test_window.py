"""Columns of many rows: one wide read serves the boxes beside it, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.read import kept
from ckptool.engine.read.numbers import Array

SHAPES = ((3, 10, 12, 2), (3, 10, 12))
VALUES = [np.arange(np.prod(shape), dtype="u2").reshape(shape) for shape in SHAPES]
ENTRIES = [TensorEntry(f"t{n}", (f"t{n}",), BY_NAME["int16"], s, ()) for n, s in enumerate(SHAPES)]


class Reads:
    """Boxes of the tensors, and a list of what was read."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []

    def __call__(self, entry: TensorEntry, box: Box) -> Array:
        self.boxes.append(box)
        return np.ascontiguousarray(VALUES[ENTRIES.index(entry)][tuple(map(slice, *box))])


@pytest.fixture(scope="module", autouse=True)
def _small_span() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "SPAN", 2 * 10 * 6 * 2 * 2)
        yield


def test_boxes_beside_each_other_are_read_at_once() -> None:
    reads = Reads()
    windows = kept.Windows(())
    for expert in range(3):
        for low in range(0, 12, 2):
            for entry, values in zip(ENTRIES, VALUES, strict=True):
                rest = entry.shape[3:]
                box = Box((expert, 0, low, *(0 for _ in rest)), (expert + 1, 10, low + 2, *rest))
                found = windows.gather(reads, entry, box)
                assert np.array_equal(found, values[tuple(map(slice, *box))])
    assert len(reads.boxes) < 3 * 6  # of both tensors; one a box would be twice as many
    assert max(box.volume for box in reads.boxes) <= 120


def test_columns_of_all_tensors_that_are_read_by_turns_are_kept() -> None:
    """Each has its share of the memory, so that it is as much as for two."""
    boxes = list[Box]()
    values = np.arange(120, dtype="u2").reshape(10, 12)
    entries = [TensorEntry(f"t{n}", (f"t{n}",), BY_NAME["int16"], (10, 12), ()) for n in range(8)]

    def read(entry: TensorEntry, box: Box) -> Array:
        boxes.append(box)
        return np.ascontiguousarray(values[tuple(map(slice, *box))])

    windows = kept.Windows(entries)
    for low in range(12):
        for entry in entries:
            found = windows.gather(read, entry, Box((0, low), (10, low + 1)))
            assert np.array_equal(found, values[:, low : low + 1])
    assert len(boxes) < 8 * 12
    assert max(box.volume for box in boxes) * 2 * len(entries) <= 480


@given(st.data())
@settings(max_examples=40)
def test_any_boxes_in_any_order_are_right(data: st.DataObject) -> None:
    windows, reads = kept.Windows(()), Reads()
    for _ in range(8):
        which = data.draw(st.integers(0, 1))
        shape = SHAPES[which]
        edges = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
        box = Box(tuple(low for low, _ in edges), tuple(high for _, high in edges))
        found = windows.gather(reads, ENTRIES[which], box)
        assert np.array_equal(found, VALUES[which][tuple(map(slice, *box))])
        assert found.flags.c_contiguous
