"""Subscripts select what numpy selects, whatever chunks a tensor has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Copy, Extent, Record, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.subscript import picks, split_subscript, take, without_other_chunks
from ckptool.errors import UsageError

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def chunked(shape: tuple[int, ...], cut: int) -> TensorEntry:
    """A tensor of one-byte elements, element ``i`` in byte ``i``; cut in two where it has rows."""
    strides = row_major_strides(shape, 1)
    boxes = [Box.whole(shape)]
    if shape and 0 < cut < shape[0]:
        boxes = [Box((0, *boxes[0].lo[1:]), (cut, *shape[1:])), Box((cut, *boxes[0].lo[1:]), shape)]
    chunks = []
    for box in boxes:
        start = sum(i * s for i, s in zip(box.lo, strides, strict=True))
        record = Record("f", start, box.volume, 0)
        at = Extent("f", start, strides, record)
        chunks.append(Chunk(box, at, 0, (Copy(at, 1),)))
    return TensorEntry("w", ("w",), BY_NAME["uint8"], shape, tuple(chunks))


def extents(entry: TensorEntry) -> list[Extent]:
    return [chunk.at for chunk in entry.chunks if isinstance(chunk.at, Extent)]


def elements(entry: TensorEntry) -> Any:
    """The bytes where the elements of a view lie."""
    found = np.full(entry.shape, -1)
    for chunk, at in zip(entry.chunks, extents(entry), strict=True):
        for index in np.ndindex(*chunk.box.shape):
            place = at.offset + sum(i * s for i, s in zip(index, at.strides, strict=True))
            found[tuple(i + lo for i, lo in zip(index, chunk.box.lo, strict=True))] = place
    return found


@st.composite
def subscripts(draw: Any) -> tuple[tuple[int, ...], str]:
    shape = draw(SHAPES)
    near = st.none() | st.integers(-6, 6)
    items = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if size and draw(st.booleans()):
            items.append(str(draw(st.integers(-size, size - 1))))
            continue
        low, high, step = draw(near), draw(near), draw(st.none() | st.integers(1, 3))
        text = ":".join("" if bound is None else str(bound) for bound in (low, high))
        items.append(text if step is None else f"{text}:{step}")
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), "...")
    return shape, ", ".join(items)


@given(subscripts(), st.integers(0, 5))
def test_a_view_is_that_of_numpy(case: tuple[tuple[int, ...], str], cut: int) -> None:
    shape, text = case
    entry = chunked(shape, cut)
    name, subscript = split_subscript(f"a.w[{text}]" if text else "a.w")
    assert name == "a.w"
    whole = np.arange(math.prod(shape)).reshape(shape)
    try:
        expected = eval(f"whole[{text}]", {"whole": whole}) if text else whole
    except IndexError:  # behind an ellipsis an index may meet a smaller dim
        with pytest.raises(UsageError, match="out of range"):
            picks(name, shape, subscript)
        return
    wanted = picks(name, shape, subscript)
    view = take(without_other_chunks(entry, wanted), wanted)
    assert coverage_problem(view) is None
    assert np.array_equal(elements(view), expected)


def test_only_a_checksum_of_what_is_wanted_whole_stays() -> None:
    entry = chunked((4, 2), 2)
    wanted = picks("w", (4, 2), split_subscript("w[1:]")[1])
    view = take(entry, wanted)
    assert [at.record is not None for at in extents(view)] == [False, True]
    assert not any(chunk.copies for chunk in view.chunks)


def test_chunks_without_wanted_elements_are_excluded() -> None:
    wanted = picks("w", (4, 2), split_subscript("w[3]")[1])
    (kept,) = without_other_chunks(chunked((4, 2), 2), wanted).chunks
    assert kept.box == Box((2, 0), (4, 2))


@pytest.mark.parametrize("text", ["layers.[0-9].w", "w[]", "w[a]", "[0]", "w[1:2:3:4]", "w[--1]"])
def test_what_is_not_a_subscript_is_a_name(text: str) -> None:
    assert split_subscript(text) == (text, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[0, 0, 0]", "3 subscripts for 2 dims"),
        ("[..., ...]", "2 subscripts for 2 dims"),
        ("[4]", "index 4 is out of range for a dim of 4"),
        ("[:, -3]", "index -3 is out of range for a dim of 2"),
        ("[::-1]", "the step -1 is less than 1"),
        ("[::0]", "the step 0 is less than 1"),
    ],
)
def test_a_subscript_that_does_not_fit(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        picks("w", (4, 2), split_subscript(f"w{text}")[1])


def test_a_subscript_of_a_tensor_without_dims() -> None:
    with pytest.raises(UsageError, match="1 subscript for 0 dims") as caught:
        picks("w", (), split_subscript("w[0:2]")[1])
    assert caught.value.hint == "at most one for each dim: 'w'"
