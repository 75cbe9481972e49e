"""Parts of tensors, as places: checked against numpy on real bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.catalog import Container, EncodedBlob, Extent, Part, Place
from ckptool.core.views import narrowed, part_of_place, pieces_of_run

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
ITEM = 8


def values_at(data: np.ndarray, at: Place, shape: tuple[int, ...]) -> np.ndarray:
    assert isinstance(at, Extent)
    found = np.empty(shape, data.dtype)
    for index in np.ndindex(*shape):
        byte = at.offset + sum(i * s for i, s in zip(index, at.strides, strict=True))
        found[index] = data.reshape(-1)[byte // ITEM]
    return found


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    lo = [draw(st.integers(0, size - 1)) for size in shape]
    hi = [draw(st.integers(first + 1, size)) for first, size in zip(lo, shape, strict=True)]
    return Box(tuple(lo), tuple(hi))


@given(SHAPES, st.data())
def test_a_box_of_a_tensor_however_its_strides_lie(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    stored = np.arange(math.prod(shape)).reshape([shape[d] for d in order])
    tensor = stored.transpose(np.argsort(order))
    at = Extent("f", 0, tuple(tensor.strides))
    box = data.draw(boxes(shape))
    place = narrowed(at, shape, box, ITEM)
    wanted = tensor[tuple(map(slice, box.lo, box.hi))]
    assert (values_at(stored, place, box.shape) == wanted).all()


@given(SHAPES, st.data())
def test_a_flat_run_of_a_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, tensor.size))
    stop = data.draw(st.integers(start, tensor.size))
    run = tensor.reshape(-1)[start:stop].copy()
    found = np.full(shape, -1)
    for box, at in pieces_of_run(Extent("f", 0, (ITEM,)), run.shape, start, stop, shape, ITEM):
        found[tuple(map(slice, box.lo, box.hi))] = values_at(run, at, box.shape)
    flat = found.reshape(-1)
    assert (flat[start:stop] == run).all()
    assert (np.delete(flat, np.s_[start:stop]) == -1).all()


def test_a_part_of_an_item_that_is_not_opened_yet() -> None:
    item = Container("f", 100, 900)
    once = narrowed(item, (4, 6), Box((1, 0), (3, 6)), ITEM)
    assert once == Container("f", 100, 900, (), Part((4, 6), 6, (6, 1)))
    twice = narrowed(once, (2, 6), Box((1, 2), (2, 5)), ITEM)
    assert twice == Container("f", 100, 900, (), Part((4, 6), 14, (6, 1)))


def test_a_part_of_what_must_be_decoded_first() -> None:
    packed = EncodedBlob("f", 0, 9, "zstd", 96, 0, (24, 8))
    assert narrowed(packed, (4, 3), Box((2, 1), (3, 2)), ITEM).start == 56


def test_a_reshape_that_strides_cannot_express() -> None:
    transposed = Extent("f", 0, (8, 32))
    with pytest.raises(ValueError, match="elements lie"):
        part_of_place(transposed, (4, 3), (12,), 0, (1,), ITEM)
