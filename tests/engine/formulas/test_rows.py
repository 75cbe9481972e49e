"""Boxes of tensors with more rows are those of the whole, whichever are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Computed, Extent, StridedPart, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.formulas.rows import MoreRows
from ckptool.engine.read.numbers import part_of

Array = np.ndarray[Any, Any]
SINGLE = BY_NAME["float32"]


@pytest.mark.parametrize("fill", ["mean", "zeros", 2])
@given(st.data())
def test_boxes_are_those_of_the_whole(fill: str | int, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(7,), (5, 4), (3, 1, 7)]))
    has = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=shape).astype("f4")
    new = {"mean": has.astype("f8").sum(0) / len(has), "zeros": has[0] * 0, 2: has[2]}[fill]
    count = data.draw(st.integers(0, 4))
    rows = np.broadcast_to(new.astype("f4"), (count, *shape[1:]))
    whole = np.concatenate([has, rows])
    place = Extent("file", 0, row_major_strides(shape, 4))
    entry = TensorEntry("w", ("w",), SINGLE, shape, (Chunk(Box.whole(shape), place),))
    formula, read = MoreRows(fill), list[Box]()
    part = StridedPart(whole.shape, 0, row_major_strides(whole.shape, 1))
    at = Computed((entry,), part, formula, reads=formula.reads)

    def gather(entry: TensorEntry, box: Box) -> Array:
        read.append(box)
        return part_of(has, box).copy().view("u4")

    for _ in range(3):
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in whole.shape]
        box = Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))
        read.clear()
        made = formula(gather, at, box, SINGLE)
        np.testing.assert_allclose(made.view("f4"), part_of(whole, box), rtol=1e-6, atol=1e-7)
        announced = [box for _, box in at.needs(box)]
        assert all(any(each.contains(box) for each in announced) for box in read if box.volume)
