"""Which box of a whole tensor is computed for a part of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.catalog import StridedPart
from ckptool.engine.read.computed import least_box, run_of_rows

torch = pytest.importorskip("torch")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_part_is_read_out_of_the_least_box(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    view, is_turned = whole, True
    for way in data.draw(st.lists(st.sampled_from(["permute", "narrow", "split", "merge"]))):
        dim = data.draw(st.integers(0, view.dim() - 1))
        if way == "permute":
            view = view.permute(data.draw(st.permutations(range(view.dim()))))
        elif way == "narrow":
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, view.shape[dim] - start)
        elif way == "split" and view.shape[dim] % 2 == 0:
            view, is_turned = view.unflatten(dim, (2, -1)), False
        elif way == "merge" and view.is_contiguous() and view.dim() > 1:
            view, is_turned = view.flatten(0, 1), False
    part = StridedPart(tuple(shape), view.storage_offset(), view.stride())
    lo = tuple(data.draw(st.integers(0, size - 1)) for size in view.shape)
    hi = tuple(data.draw(st.integers(n + 1, size)) for n, size in zip(lo, view.shape, strict=True))
    wanted = view[tuple(map(slice, lo, hi))]
    found = least_box(part, Box(lo, hi))
    assert found is not None or not is_turned
    if found is not None and is_turned:
        assert found[0].volume == wanted.numel()
    for region, first, strides in filter(None, [found, run_of_rows(part, Box(lo, hi))]):
        inside = whole[tuple(map(slice, region.lo, region.hi))].clone(
            memory_format=torch.contiguous_format
        )
        assert torch.equal(inside.as_strided(wanted.shape, strides, first), wanted)
