"""Boxes of tensors with changes are those of the whole, whichever are computed, in any order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from zstandard import ZstdCompressor

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Computed, Extent, StridedPart, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.formulas import delta, delta_changes
from ckptool.engine.formulas.delta import ChangedBits, KeptChanges, Step, box_and_share
from ckptool.engine.read.numbers import part_of

Array = np.ndarray[Any, Any]
SHAPES = [(), (1,), (13,), (5, 4), (3, 1, 7), (2, 3, 2, 3), (0, 4)]
HALF = BY_NAME["float16"]


def encoded(before: Array, after: Array, encoding: str) -> Array:
    old, new = before.reshape(-1).view("u1"), after.reshape(-1).view("u1")
    at = np.flatnonzero(old != new).astype("<u4")
    head = np.array([at.size], "<u4").tobytes()
    data = (old ^ new).tobytes() if encoding == "xor" else head + at.tobytes() + new[at].tobytes()
    return np.frombuffer(ZstdCompressor(level=1).compress(data), "u1")


def entry_of(values: Array, name: str, dtype: str) -> TensorEntry:
    place = Extent(name, 0, row_major_strides(values.shape, values.itemsize))
    chunk = Chunk(Box.whole(values.shape), place)
    return TensorEntry(name, (name,), BY_NAME[dtype], values.shape, (chunk,))


@given(st.data())
def test_boxes_are_those_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    states = [random.integers(0, 1 << 16, shape, "u2")]
    stored, steps = {"base": states[0]}, []
    for encoding in data.draw(st.lists(st.sampled_from(["xor", "overwrite"]), max_size=4)):
        changed = states[-1] ^ random.integers(0, 1 << 16, shape, "u2")
        states.append(np.where(random.random(shape) < 0.4, changed, states[-1]).astype("u2"))
        stored[f"d{len(states)}"] = encoded(states[-2], states[-1], encoding)
        digest = xxhash.xxh3_128(states[-1].tobytes()).hexdigest()
        steps.append(Step(encoding, "xxh3-128", digest, "a delta"))
    entries = [
        entry_of(array, name, "float16" if name == "base" else "uint8")
        for name, array in stored.items()
    ]
    formula = ChangedBits(steps, KeptChanges())
    part = StridedPart(shape, 0, row_major_strides(shape, 1))
    at = Computed(tuple(entries), part, formula, reads=box_and_share)

    def gather(entry: TensorEntry, box: Box) -> Array:
        return part_of(stored[entry.name], box).copy()

    def draw_box() -> Box:
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
        return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))

    spans, piece = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 9))
    kept = delta._SPAN, delta_changes._PIECE, delta_changes._POSITIONS
    try:
        delta._SPAN, delta_changes._PIECE, delta_changes._POSITIONS = spans, piece, piece
        for box in [draw_box() for _ in range(4)]:
            made = formula(gather, at, box, HALF)
            assert made.tobytes() == part_of(states[-1], box).tobytes()
    finally:
        delta._SPAN, delta_changes._PIECE, delta_changes._POSITIONS = kept


def test_what_is_announced_of_payloads_is_all_of_them() -> None:
    base, payload = np.zeros((64, 8), "u2"), np.zeros(1001, "u1")
    entries = entry_of(base, "base", "float16"), entry_of(payload, "d", "uint8")
    part = StridedPart(base.shape, 0, row_major_strides(base.shape, 1))
    at = Computed(entries, part, ChangedBits((), KeptChanges()), reads=box_and_share)
    shares = [[*box_and_share(at, Box((row, 0), (row + 4, 8)))][1][1] for row in range(0, 64, 4)]
    assert shares[0].lo == (0,)
    assert shares[-1].hi == (1001,)
    assert all(one.hi == other.lo for one, other in pairwise(shares))
