"""DeepSpeed's flat partitions against partitions made with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Extent
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged
from ckptool.formats.deepspeed.flat_runs import FlatRun, place_run
from ckptool.formats.deepspeed.zero_partitions import place_flat_runs, place_split_runs

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6).map(
    lambda shapes: {f"p{number}": shape for number, shape in enumerate(shapes)}
)


def values(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Each parameter with numbers that no other element has."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    return {
        name: np.arange(end - math.prod(shape), end).reshape(shape)
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }


def rebuilt(
    shapes: dict[str, tuple[int, ...]], runs: list[FlatRun], vectors: list[np.ndarray]
) -> dict[str, np.ndarray]:
    found = {name: np.full(shape, -1) for name, shape in shapes.items()}
    for run in runs:
        piece = vectors[run.part][run.at : run.at + run.stop - run.start]
        found[run.name].reshape(-1)[run.start : run.stop] = piece
    return found


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


@given(SHAPES, st.integers(1, 5), st.data())
def test_a_group_laid_out_flat_is_found_again(shapes, parts, data) -> None:
    expected = values(shapes)
    paddings = [*[data.draw(st.integers(0, 3)) for _ in list(shapes)[1:]], 0]
    pieces = [
        np.pad(array.reshape(-1), (0, padding), constant_values=-9)
        for array, padding in zip(expected.values(), paddings, strict=True)
    ]
    flat = np.concatenate(pieces)
    flat = np.pad(flat, (0, -flat.size % (2 * parts)), constant_values=-9)
    runs = list(place_flat_runs(shapes, paddings, flat.size // parts, parts))
    assert same(rebuilt(shapes, runs, np.split(flat, parts)), expected)


@given(SHAPES, st.integers(1, 5))
def test_parameters_cut_one_by_one_are_found_again(shapes, parts) -> None:
    expected = values(shapes)
    cuts: list[list[np.ndarray]] = [[] for _ in range(parts)]
    for array in expected.values():
        padded = np.pad(array.reshape(-1), (0, -array.size % parts), constant_values=-9)
        for part, piece in enumerate(np.split(padded, parts)):
            cuts[part].append(piece)
    vectors = list(map(np.concatenate, cuts))
    runs: list[FlatRun] = []
    for part in range(parts):
        sizes = [piece.size for piece in cuts[part]]
        halves = [sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :])]
        runs += [
            replace(run, part=part, at=run.at + run.part * halves[0])
            for run in place_split_runs(shapes, halves, part, parts)
        ]
    assert same(rebuilt(shapes, runs, vectors), expected)


@pytest.mark.parametrize("size", [2, 9, 100])
def test_a_group_that_does_not_fit_its_partitions_is_damaged(size: int) -> None:
    with pytest.raises(Damaged, match="do not fit"):
        list(place_flat_runs({"a": (3, 4)}, [0], size, 2))


@pytest.mark.parametrize(("sizes", "word"), [([3, 3], "crosses"), ([4], "take 6"), ([9], "take 6")])
def test_sub_groups_of_another_size_are_damaged(sizes: list[int], word: str) -> None:
    with pytest.raises(Damaged, match=word):
        list(place_split_runs({"a": (4, 2), "b": (2, 2)}, sizes, 0, 2))


def test_a_run_becomes_rows_and_their_ragged_ends() -> None:
    at = Extent("file", 1000, (4,))
    chunks = place_run(FlatRun("a", 2, 11, 0, 5), BY_NAME["float32"], (4, 3), at, rank=7)
    assert [(chunk.box, chunk.at.offset) for chunk in chunks] == [
        (Box((0, 2), (1, 3)), 1020),
        (Box((1, 0), (3, 3)), 1024),
        (Box((3, 0), (4, 2)), 1048),
    ]
    assert all(isinstance(chunk.at, Extent) and chunk.at.strides == (12, 4) for chunk in chunks)
    assert {chunk.rank for chunk in chunks} == {7}
