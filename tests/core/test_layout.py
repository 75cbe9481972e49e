"""Tiles: contiguous ranges of the C-ordered image that cover it exactly, within the limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.layout import Data, FileLayout, Layout, Literal, Verbatim, tiles

SHAPES = st.lists(st.integers(0, 5), max_size=4)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


@given(SHAPES, st.data(), ITEMSIZES, st.integers(1, 200))
def test_tiles_are_the_image_in_order(
    shape: list[int], data: st.DataObject, itemsize: int, limit: int
) -> None:
    lo = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    box = Box.at(lo, shape)
    image = np.arange(box.volume).reshape(shape)
    found = list(tiles(box, itemsize, limit))
    pieces = [image[tuple(map(slice, t.relative_to(lo).lo, t.relative_to(lo).hi))] for t in found]
    joined = np.concatenate([p.reshape(-1) for p in pieces]) if pieces else np.arange(0)
    assert joined.tolist() == list(range(box.volume))


@given(SHAPES, ITEMSIZES, st.integers(1, 200))
def test_tiles_stay_within_the_limit(shape: list[int], itemsize: int, limit: int) -> None:
    for tile in tiles(Box.whole(shape), itemsize, limit):
        assert tile.volume * itemsize <= max(limit, itemsize)


@given(SHAPES, ITEMSIZES)
def test_what_fits_is_one_tile(shape: list[int], itemsize: int) -> None:
    box = Box.whole(shape)
    found = list(tiles(box, itemsize, max(1, box.volume * itemsize)))
    assert found == ([box] if box.volume else [])


@pytest.mark.parametrize(
    ("shape", "limit", "count"),
    [((), 4, 1), ((0,), 4, 0), ((10,), 40, 1), ((10,), 12, 4), ((3, 5), 20, 3), ((3, 5), 8, 9)],
)
def test_counts(shape: tuple[int, ...], limit: int, count: int) -> None:
    assert len(list(tiles(Box.whole(shape), 4, limit))) == count


def test_sizes_are_known_before_a_byte_moves() -> None:
    parts = (Literal(b"head"), Data.of("w", Box.whole((2, 3)), 4), Verbatim("config.json", 7))
    file = FileLayout("m.bin", parts)
    assert file.nbytes == 4 + 24 + 7
    assert Layout((file, file), folder=True).nbytes == 2 * file.nbytes
