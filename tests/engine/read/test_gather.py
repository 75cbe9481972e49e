"""Gathering boxes of chunks, against numpy and torch."""

from __future__ import annotations

import zlib
from contextlib import closing
from itertools import pairwise, product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from conftest import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from trials import trials

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, EncodedBlob, Extent, Place, Record, TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.layout import tiles
from ckptool.engine.read import gather, segments
from ckptool.engine.read.gather import unit
from ckptool.engine.read.rounding import cast
from ckptool.engine.read.tensors import TensorReader
from ckptool.errors import Damaged
from ckptool.storage.files import ReadPolicy
from ckptool.storage.local import LocalReader, LocalSource

RNG = np.random.default_rng(3)
DATA = RNG.integers(0, 256, 4096, np.uint8).tobytes()


@st.composite
def strided(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], Box]:
    """Item size, offset, shape, byte strides (any order, gaps, repeats) and a box within."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    strides = tuple(draw(st.integers(0, 12)) * itemsize for _ in shape)
    offset = draw(st.integers(0, 64))
    spans = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return (
        itemsize,
        offset,
        strides,
        Box(*zip(*spans, strict=True)) if spans else Box((), ()),
    )


def gathered(at: Place, box: Box, itemsize: int, block: int | None = None) -> np.ndarray:
    """Through a file."""
    dtype = next(dtype for dtype in BY_NAME.values() if dtype.itemsize == itemsize)
    out = np.zeros(box.shape, unit(itemsize))
    with TemporaryDirectory() as folder:
        Path(folder, "f").write_bytes(DATA)
        if isinstance(at, EncodedBlob):
            Path(folder, "z").write_bytes(b"head" + deflated(DATA))
        source = LocalSource(Path(folder), {})
        source.policy = ReadPolicy(block=block or 1)
        reader = TensorReader(source)
        try:
            reader.elements.fill_from(at, out, box, dtype)
        finally:
            reader.close()
    return out


def deflated(data: bytes) -> bytes:
    machine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return machine.compress(data) + machine.flush()


def expected(offset: int, strides: tuple[int, ...], box: Box, itemsize: int) -> np.ndarray:
    start = offset + sum(l * s for l, s in zip(box.lo, strides, strict=True))
    if not box.volume:
        return np.zeros(box.shape, unit(itemsize))
    return np.ndarray(box.shape, unit(itemsize), DATA, start, strides)


@given(strided(), st.sampled_from([None, 1]))
@settings(max_examples=trials(60))
def test_any_strides_and_box(
    found: tuple[int, int, tuple[int, ...], Box], block: int | None
) -> None:
    """Also where no gap is read over, so that runs are read one by one."""
    itemsize, offset, strides, box = found
    result = gathered(Extent("f", offset, strides), box, itemsize, block)
    assert result.tobytes() == expected(offset, strides, box, itemsize).tobytes()


def test_columns_are_read_as_rows_of_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of a transpose: its runs are asked for at once, not one for each row of the file."""
    stored = RNG.integers(0, 1 << 32, (64, 8192), np.uint32)
    (tmp_path / "f").write_bytes(stored.tobytes())
    asked: list[Any] = []
    monkeypatch.setattr(LocalReader, "read_into", lambda *_: pytest.fail("a run by itself"))
    read_runs = LocalReader.read_runs

    def note(*words: Any) -> Any:
        asked.append(words)
        return read_runs(*words)

    monkeypatch.setattr(LocalReader, "read_runs", note)
    out = np.zeros((50, 64), np.uint32)
    at = Extent("f", 0, (4, 32768))
    reader = TensorReader(LocalSource(tmp_path, {}))
    reader.elements.fill_from(at, out, Box((100, 0), (150, 64)), BY_NAME["float32"])
    reader.close()
    assert (out == stored.T[100:150]).all()
    assert len(asked) == 1


def test_short_runs_of_three_turned_dims_are_read_with_what_is_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of a tensor whose dims are reversed: runs of 32 bytes, 512 bytes apart."""
    stored = RNG.integers(0, 1 << 32, (32, 16, 128), np.uint32)
    (tmp_path / "f").write_bytes(stored.tobytes())
    asked: list[Any] = []
    monkeypatch.setattr(LocalReader, "read_runs", lambda *_: pytest.fail("short runs"))
    read_into = LocalReader.read_into

    def note(*words: Any) -> Any:
        asked.append(words)
        return read_into(*words)

    monkeypatch.setattr(LocalReader, "read_into", note)
    out = np.zeros((8, 16, 32), np.uint32)
    at = Extent("f", 0, (4, 512, 8192))
    reader = TensorReader(LocalSource(tmp_path, {}))
    reader.elements.fill_from(at, out, Box((40, 0, 0), (48, 16, 32)), BY_NAME["float32"])
    reader.close()
    assert (out == stored.transpose(2, 1, 0)[40:48]).all()
    assert len(asked) == 1


@given(strided())
@settings(max_examples=50)
def test_packed_blobs(found: tuple[int, int, tuple[int, ...], Box]) -> None:
    itemsize, offset, strides, box = found
    at = EncodedBlob("z", 4, len(deflated(DATA)), "deflate", len(DATA), offset, strides)
    result = gathered(at, box, itemsize)
    assert result.tobytes() == expected(offset, strides, box, itemsize).tobytes()


@given(strided())
@settings(max_examples=80)
def test_pieces_smaller_than_a_span(
    found: tuple[int, int, tuple[int, ...], Box],
) -> None:
    """Every way of splitting a strided read, forced by a tiny span."""
    itemsize, offset, strides, box = found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "SPAN", 2 * itemsize)
        patch.setattr(segments, "_LONG_RUN", 8)
        result = gathered(Extent("f", offset, strides), box, itemsize)
    assert result.tobytes() == expected(offset, strides, box, itemsize).tobytes()


VALUES = {
    "float32": torch.tensor([1.5, -2.0, float("nan"), 0.0, -0.0]),
    "bfloat16": torch.tensor([1.5, -2.0, float("inf")], dtype=torch.bfloat16),
    "float64": torch.tensor([1e300, -1e-300], dtype=torch.float64),
    "complex64": torch.tensor([1 + 2j, -3 - 4j, 0j], dtype=torch.complex64),
    "complex128": torch.tensor([1 + 2j, -3 - 4j], dtype=torch.complex128),
    "int64": torch.tensor([1, -2, 2**62, -(2**63)]),
    "int16": torch.tensor([1, -2, -(2**15)], dtype=torch.int16),
}


def repaired(tensor: torch.Tensor, ops: tuple[str, ...], folder: Path) -> bytes:
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    (folder / "f").write_bytes(bits(tensor)[2])
    at = Extent("f", 0, (dtype.itemsize,), ops=ops)
    out = np.zeros(tensor.shape, unit(dtype.itemsize))
    reader = TensorReader(LocalSource(folder, {}))
    reader.elements.fill_from(at, out, Box.whole(tensor.shape), dtype)
    reader.close()
    return out.tobytes()


@pytest.mark.parametrize("name", VALUES)
def test_negative_bit(name: str, tmp_path: Path) -> None:
    assert repaired(VALUES[name], ("neg",), tmp_path) == bits(-VALUES[name])[2]


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_conjugate_bit(name: str, tmp_path: Path) -> None:
    assert repaired(VALUES[name], ("conj",), tmp_path) == bits(VALUES[name].conj())[2]


@pytest.mark.parametrize("name", VALUES)
def test_byte_order(name: str, tmp_path: Path) -> None:
    big = torch.view_as_real(VALUES[name]) if "complex" in name else VALUES[name]
    itemsize = big.element_size()
    swapped = np.frombuffer(bits(big)[2], f"u{itemsize}").byteswap().tobytes()
    assert repaired(VALUES[name], ("byteswap",), tmp_path) == swapped


@pytest.mark.parametrize("name", ["complex64"])
def test_repairs_come_one_after_the_other(name: str, tmp_path: Path) -> None:
    value = VALUES[name]
    assert repaired(value, ("conj", "neg"), tmp_path) == bits(-value.conj().resolve_conj())[2]


FLOATING = [d for d in BY_NAME.values() if d.kind == "float" and hasattr(torch, d.name)]


@pytest.mark.parametrize("wanted", FLOATING, ids=str)
@pytest.mark.parametrize("stored", FLOATING, ids=str)
def test_cast_is_torchs(stored: DType, wanted: DType) -> None:
    raw = torch.tensor(np.frombuffer(DATA[: 64 * stored.itemsize], np.uint8).copy())
    values = raw.view(getattr(torch, stored.name))
    array = raw.numpy().view(unit(stored.itemsize)).reshape(8, 8)
    result = cast(array, stored, wanted)
    assert result.shape == (8, 8)
    assert result.tobytes() == bits(values.to(getattr(torch, wanted.name)))[2]


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    reader = TensorReader(LocalSource(tmp_path, {}))
    at, out = Extent("f", 0, (4,)), np.zeros(3, "u4")
    with pytest.raises(Damaged, match=r"f: .* 10 bytes"):
        reader.elements.fill_from(at, out, Box.whole((3,)), BY_NAME["float32"])


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[np.ndarray, list[Box]]:
    """A tensor and boxes that tile it: a grid, whose cells are cut along the first dim or not."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    cells = product(*(pairwise(ends) for ends in cuts))
    values = RNG.integers(0, 2**16, shape, np.uint16)
    return values, [Box(*zip(*cell, strict=True)) for cell in cells]


@given(cut_tensors(), st.integers(2, 64), st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_rows_one_behind_the_other(
    found: tuple[np.ndarray, list[Box]], span: int, order: Random
) -> None:
    """Tiles of all sizes in any order; what is read of records is noted as it lies there."""
    values, cells = found
    data, chunks, noted = bytearray(3), [], []
    turned = order.random() < 0.2
    for box in cells:
        cell = values[tuple(map(slice, box.lo, box.hi))]
        stored = np.ascontiguousarray(cell.T if turned else cell)
        at = Extent("f", len(data), stored.strides, Record("f", len(data), cell.nbytes, 0))
        chunks.append(Chunk(box, replace(at, strides=at.strides[::-1]) if turned else at))
        data += stored.tobytes()
    entry = TensorEntry("t", ("t",), BY_NAME["bfloat16"], values.shape, tuple(chunks))
    whole = Box.whole(values.shape)
    wanted = [box for limit in (2, 4, 8, 16, 32, 64, 128) for box in tiles(whole, 2, limit)]
    order.shuffle(wanted)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(gather, "SPAN", span)
        Path(folder, "f").write_bytes(data)
        source = LocalSource(Path(folder), {})
        note = lambda record, offset, piece: noted.append((offset, bytes(piece)))  # noqa: E731
        with closing(TensorReader(source, note)) as reader:
            for box in wanted:
                expected = values[tuple(map(slice, box.lo, box.hi))]
                assert reader.elements.gather(entry, box).tobytes() == expected.tobytes()
    assert all(data[offset:].startswith(piece) for offset, piece in noted)
