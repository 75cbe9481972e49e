"""Boxes against numpy index sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import (
    Box,
    flat_range,
    is_grid,
    row_major_strides,
    start_of_run,
)
from ckptool.core.sharding.overlaps import overlapping_pair


@st.composite
def boxes(draw: st.DrawFn, dims: int, limit: int = 6) -> Box:
    spans = [sorted(draw(st.tuples(*[st.integers(0, limit)] * 2))) for _ in range(dims)]
    return Box(tuple(lo for lo, _ in spans), tuple(hi for _, hi in spans))


def same_rank(count: int) -> st.SearchStrategy[tuple[Box, ...]]:
    return st.integers(0, 3).flatmap(lambda dims: st.tuples(*[boxes(dims)] * count))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.lo, box.hi)))


@given(same_rank(1))
def test_volume_counts_elements(found: tuple[Box]) -> None:
    assert found[0].volume == len(elements(found[0]))


@given(same_rank(2))
def test_intersection_is_that_of_the_elements(found: tuple[Box, Box]) -> None:
    one, other = found
    common = one.intersect(other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)
    assert common == other.intersect(one)


@given(same_rank(2))
def test_a_box_that_contains_another_holds_its_elements(found: tuple[Box, Box]) -> None:
    one, other = found
    if one.contains(other):
        assert elements(other) <= elements(one)
    elif other.volume:
        assert not elements(other) <= elements(one)


@given(same_rank(2))
def test_relative_boxes_move_and_keep_their_shape(found: tuple[Box, Box]) -> None:
    one, other = found
    moved = one.relative_to(other.lo)
    assert moved.shape == one.shape
    assert moved.relative_to([-l for l in other.lo]) == one


@given(st.integers(0, 3).flatmap(lambda d: st.lists(boxes(d, 4), max_size=6)))
def test_overlapping_pair_is_found_where_there_is_one(found: list[Box]) -> None:
    pair = overlapping_pair(found)
    overlap = any(a.intersect(b) for a, b in itertools.combinations(found, 2))
    assert (pair is not None) == overlap
    if pair is not None:
        assert pair[0].intersect(pair[1])


CUTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)


@given(CUTS, st.data())
def test_a_grid_tiles_its_shape_and_nothing_else_passes_as_one(
    cuts: list[list[int]], data: st.DataObject
) -> None:
    columns = [set(itertools.pairwise([0, *itertools.accumulate(sizes)])) for sizes in cuts]
    grid = [
        Box(tuple(l for l, _ in at), tuple(h for _, h in at)) for at in itertools.product(*columns)
    ]
    shape = [sum(sizes) for sizes in cuts]
    assert is_grid(data.draw(st.permutations(grid)), shape)
    spoilt = data.draw(st.lists(st.sampled_from(grid), max_size=len(grid) + 1))
    if is_grid(spoilt, shape):
        assert sum(box.volume for box in spoilt) == np.prod(shape, dtype=int)
        assert overlapping_pair(spoilt) is None


@given(st.integers(0, 2).flatmap(lambda d: st.tuples(st.lists(boxes(d, 3), max_size=4), boxes(d))))
def test_boxes_that_are_a_grid_tile_the_shape(found: tuple[list[Box], Box]) -> None:
    if is_grid(found[0], found[1].hi):
        held = [element for box in found[0] for element in elements(box)]
        assert sorted(held) == sorted(elements(Box.whole(found[1].hi)))


@given(st.lists(st.integers(1, 5), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_strides_are_numpys(shape: list[int], itemsize: int) -> None:
    assert row_major_strides(shape, itemsize) == np.empty(shape, f"V{itemsize}").strides


def test_whole_and_at() -> None:
    assert Box.whole((2, 3)) == Box((0, 0), (2, 3)) == Box.at((0, 0), (2, 3))
    assert Box.at((4, 1), (2, 3)) == Box((4, 1), (6, 4))
    assert Box.whole(()).volume == 1


@pytest.mark.parametrize(
    ("box", "text"), [(Box((0, 2), (4, 5)), "[0:4, 2:5]"), (Box((), ()), "[]")]
)
def test_text(box: Box, text: str) -> None:
    assert str(box) == text


def diagonal(count: int) -> list[Box]:
    """Long and thin: the first dim separates hardly any, the second all."""
    return [Box((i, i), (i + count, i + 1)) for i in range(count)]


def three_ways(count: int) -> list[Box]:
    """Three stacks of slices, each cut along another dim; no one dim separates them all."""
    side = count
    return [
        box
        for i in range(count)
        for box in (
            Box((i, 0, 0), (i + 1, 2 * side, side)),
            Box((side, i, 0), (2 * side, i + 1, side)),
            Box((side, side, i), (2 * side, 2 * side, i + 1)),
        )
    ]


@given(st.integers(2, 4).flatmap(lambda d: st.lists(boxes(d, 12), min_size=17, max_size=40)))
def test_overlapping_pair_of_many(found: list[Box]) -> None:
    pair = overlapping_pair(found)
    overlap = any(a.intersect(b) for a, b in itertools.combinations(found, 2))
    assert (pair is not None) == overlap
    if pair is not None:
        assert pair[0].intersect(pair[1])


@given(st.permutations(range(8)), st.integers(0, 63), st.booleans())
def test_one_overlap_in_a_grid_is_found(columns: list[int], spoiled: int, spoil: bool) -> None:
    grid = [Box((i, j), (i + 1, j + 1)) for i in range(8) for j in columns]
    if spoil:
        lo = grid[spoiled].lo
        grid.append(Box(lo, (lo[0] + 1, lo[1] + 9)))
    assert (overlapping_pair(grid) is not None) == spoil


@pytest.mark.parametrize(("make", "count"), [(diagonal, 20_000), (three_ways, 2_000)])
def test_many_boxes_are_quick(make: Callable[[int], list[Box]], count: int) -> None:
    made = make(count)
    assert overlapping_pair(made) is None
    dims = len(made[0].lo)
    extra = Box((2_000 - 1,) * dims, (2_000 + 1,) * dims)
    assert overlapping_pair([*made, extra]) is not None


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, int(np.prod(shape)))] * 2)))
    return shape, start, stop


@given(ranges())
def test_a_flat_range_is_a_few_boxes_in_row_major_order(
    found: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = found
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    boxes = flat_range(shape, start, stop)
    parts = [grid[tuple(map(slice, box.lo, box.hi))].ravel() for box in boxes]
    assert [int(i) for part in parts for i in part] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (4, 3)])
def test_a_flat_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="of shape"):
        flat_range((2, 3), start, stop)


def test_only_a_run_of_a_tensor_has_a_start() -> None:
    assert start_of_run(Box((1, 2, 0), (2, 4, 6)), (4, 5, 6)) == 42
    assert start_of_run(Box((1, 2, 3), (2, 3, 5)), (4, 5, 6)) == 45
    assert start_of_run(Box((1, 2, 3), (2, 4, 6)), (4, 5, 6)) is None
    assert start_of_run(Box((), ()), ()) == 0
