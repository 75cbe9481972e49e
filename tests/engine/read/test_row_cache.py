"""Columns cut out of rows that are read once, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, Record, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.plan import Tile, TileSource
from ckptool.engine.read import row_cache as rows
from ckptool.engine.read.row_cache import RowCache
from ckptool.storage.local import LocalReader

FLOAT = BY_NAME["float32"]
WIDE = rows._NARROW // FLOAT.itemsize


def saved(
    path: Path, values: np.ndarray, corner: tuple[int, ...] = (0, 0), **extent: object
) -> Chunk:
    """A chunk at ``corner`` of its tensor that lies in a file of its own."""
    path.write_bytes(values.tobytes())
    at = Extent(path.name, 0, row_major_strides(values.shape, 4), **extent)  # type: ignore[arg-type]
    return Chunk(Box.at(corner, values.shape), at)


def tile(chunks: list[Chunk], box: Box) -> Tile:
    """The tile that holds a box of a tensor made of chunks."""
    shape = tuple(max(c.box.hi[d] for c in chunks) for d in range(len(box.lo)))
    entry = TensorEntry("w", ("w",), FLOAT, shape, tuple(chunks))
    common = [(chunk, chunk.box.intersect(box)) for chunk in chunks]
    sources = [TileSource(c, b, b.relative_to(box.lo)) for c, b in common if b is not None]
    return Tile(0, 0, 0, box.shape, entry, tuple(sources))


def values(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype="f4").reshape(shape)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.lists(st.integers(1, 40), min_size=2, max_size=5),
)
def test_columns_of_two_chunks(
    tmp_path: Path, upper: int, lower: int, depth: int, widths: list[int]
) -> None:
    whole = values(upper + lower, sum(widths) * WIDE, depth)
    zeros = (0, 0)
    chunks = [
        saved(tmp_path / "a", whole[:upper], (0, *zeros)),
        saved(tmp_path / "b", whole[upper:], (upper, *zeros)),
    ]
    reader = LocalReader(str(tmp_path))
    kept, start = RowCache(reader, lambda *read: None), 0
    for width in widths:
        box = Box((0, start, 0), (upper + lower, start + width * WIDE, depth))
        found = kept.columns(tile(chunks[::-1], box))
        assert found == whole[:, box.lo[1] : box.hi[1]].tobytes()
        start = box.hi[1]
    reader.close()


@pytest.mark.parametrize(
    ("why", "shape", "lo", "hi"),
    [
        ("narrow columns", (4, WIDE), (0, 0), (4, WIDE // 2)),
        ("one dim", (4 * WIDE,), (0,), (2 * WIDE,)),
        ("part of a later dim", (4, 4, WIDE), (0, 0, 0), (4, 2, WIDE // 2)),
    ],
)
def test_what_is_not_a_block_of_wide_columns(
    tmp_path: Path, why: str, shape: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...]
) -> None:
    chunk = saved(tmp_path / "a", values(*shape), (0,) * len(shape))
    reader = LocalReader(str(tmp_path))
    assert RowCache(reader, lambda *read: None).columns(tile([chunk], Box(lo, hi))) is None
    reader.close()


def test_bytes_that_need_repair_are_left_to_others(tmp_path: Path) -> None:
    chunk = saved(tmp_path / "a", values(4, 2 * WIDE), ops=("byteswap",))
    reader = LocalReader(str(tmp_path))
    wanted = tile([chunk], Box((0, 0), (4, WIDE)))
    assert RowCache(reader, lambda *read: None).columns(wanted) is None
    reader.close()


@pytest.mark.parametrize("step", [0, 1, 4, 1 << 20])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_dim_of_one_index_has_any_stride(dim: int, step: int, tmp_path: Path) -> None:
    whole = values(5, 1, WIDE) if dim else values(5, 2, WIDE)
    rows = 5 if dim else 1
    first = saved(tmp_path / "a", whole[:rows], (0, 0, 0))
    strides = [*first.at.strides]  # type: ignore[union-attr]
    strides[dim] = step
    chunks = [Chunk(first.box, replace(first.at, strides=tuple(strides)))]  # type: ignore[type-var]
    if not dim:
        chunks.append(saved(tmp_path / "b", whole[1:], (1, 0, 0)))
    reader = LocalReader(str(tmp_path))
    found = RowCache(reader, lambda *read: None).columns(
        tile(chunks, Box((0, 1 - dim, 0), (5, 2 - dim, WIDE)))
    )
    assert found == whole[:, -1:].tobytes()
    reader.close()


def test_rows_that_do_not_fit_are_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = values(8, 2 * WIDE)
    chunks = [saved(tmp_path / "a", whole[:4]), saved(tmp_path / "b", whole[4:], (4, 0))]
    monkeypatch.setattr(rows, "SPAN", whole.nbytes // 2)
    reader = LocalReader(str(tmp_path))
    kept = RowCache(reader, lambda *read: None)
    assert kept.columns(tile(chunks, Box((0, 0), (8, WIDE)))) is None
    for half in range(2):
        box = Box((4 * half, WIDE), (4 * half + 4, 2 * WIDE))
        assert kept.columns(tile(chunks, box)) == whole[4 * half : 4 * half + 4, WIDE:].tobytes()
    reader.close()


def test_rows_are_read_once_for_all_their_columns(tmp_path: Path) -> None:
    whole = values(4, 3 * WIDE)
    record = Record("a", 0, whole.nbytes, 0)
    chunk = saved(tmp_path / "a", whole, record=record)
    noted: list[tuple[int, int]] = []
    reader = LocalReader(str(tmp_path))
    kept = RowCache(reader, lambda record, offset, data: noted.append((offset, len(data))))
    for column in range(3):
        kept.columns(tile([chunk], Box((0, column * WIDE), (4, (column + 1) * WIDE))))
    assert noted == [(0, whole.nbytes)]
    reader.close()
