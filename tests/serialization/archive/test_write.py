"""The archives that are laid out, against torch.save's own and python's zipfile."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from typing import Any

import pytest
import torch
from conftest import bits
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, Literal, Part
from ckptool.errors import Unsupported
from ckptool.serialization.archive.write import lay_out_archive
from ckptool.serialization.pickle.write import TensorRef

DTYPES = [name for name in BY_NAME if hasattr(torch, name) and BY_NAME[name].kind != "bits"]


def reference(name: str, tensor: torch.Tensor) -> TensorRef:
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    shape = tuple(tensor.shape)
    place = Extent("f", 0, row_major_strides(shape, dtype.itemsize))
    entry = TensorEntry(name, (name,), dtype, shape, (Chunk(Box.whole(shape), place),))
    return TensorRef.whole(entry)


def content(part: Part, tensors: dict[str, torch.Tensor]) -> bytes:
    assert isinstance(part, Data | Literal)
    return part.data if isinstance(part, Literal) else bits(tensors[part.name])[2]


def written(state: dict[str, Any], root: str = "archive") -> bytes:
    """The archive's bytes, as the engine would write them."""
    tensors = {n: v for n, v in state.items() if isinstance(v, torch.Tensor)}
    refs = {n: reference(n, t) for n, t in tensors.items()}
    parts = lay_out_archive({**state, **refs}, root=root)
    pieces = [content(p, tensors) for p in parts]
    for number, part in enumerate(parts):
        if isinstance(part, Literal):
            data = bytearray(part.data)
            for patch in part.patches:
                crc = zlib.crc32(pieces[number - patch.distance])
                data[patch.at : patch.at + 4] = struct.pack("<L", crc)
            pieces[number] = bytes(data)
    return b"".join(pieces)


def saved(state: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def some(name: str, *shape: int) -> torch.Tensor:
    count = math.prod(shape) * BY_NAME[name].itemsize
    data = (torch.arange(count) % 2).to(torch.uint8)
    return data.view(getattr(torch, name)).reshape(shape)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=4,
    )
)
def test_torch_and_zipfile_read_it(shapes: dict[str, tuple[str, list[int]]]) -> None:
    state = {name: some(dtype, *shape) for name, (dtype, shape) in shapes.items()}
    data = written(state)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in state.items()}


STATES = {
    "nothing": {},
    "one": {"w": some("float32", 3, 4)},
    "several": {"w": some("float32", 30, 40), "b": some("bfloat16", 7), "step": 3},
    "empty": {"none": torch.empty(0, 4), "after": some("int64", 5)},
    "zero_d": {"s": some("float64")},
    "untyped": {"f8": some("float8_e4m3fn", 5), "u16": some("uint16", 3)},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_records_lie_where_torch_puts_them(state: dict[str, Any]) -> None:
    """The same records in the same order, with data at the same place but for the pickle's size."""
    ours, theirs = (zipfile.ZipFile(io.BytesIO(data)) for data in (written(state), saved(state)))
    assert [i.filename for i in ours.infolist()] == [i.filename for i in theirs.infolist()]
    for mine, other in zip(ours.infolist(), theirs.infolist(), strict=True):
        if mine.filename.endswith(("data.pkl", "serialization_id")):
            continue
        assert ours.read(mine) == theirs.read(other)
        assert (mine.CRC, mine.flag_bits, mine.compress_type, mine.extra) == (
            other.CRC, other.flag_bits, other.compress_type, other.extra,
        )  # fmt: skip


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_archive_is_torchs_byte_for_byte_apart_from_its_id(state: dict[str, Any]) -> None:
    ours, theirs = written(state), saved(state)
    pickles = [zipfile.ZipFile(io.BytesIO(d)).read("archive/data.pkl") for d in (ours, theirs)]
    if len(pickles[0]) != len(pickles[1]):
        pytest.skip("torch's pickle has another length, and moves all that follows")
    assert without_id(ours) == without_id(theirs).replace(pickles[1], pickles[0])


def without_id(data: bytes) -> bytes:
    archive = zipfile.ZipFile(io.BytesIO(data))
    info = archive.getinfo("archive/.data/serialization_id")
    data = data.replace(archive.read(info), b"0" * info.file_size)
    for name in (info.filename, "archive/data.pkl"):
        data = data.replace(struct.pack("<L", archive.getinfo(name).CRC), bytes(4))
    return data


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_storages_are_aligned(state: dict[str, Any]) -> None:
    data = written(state)
    for info in zipfile.ZipFile(io.BytesIO(data)).infolist():
        name_length, extra_length = struct.unpack_from("<2H", data, info.header_offset + 26)
        assert (info.header_offset + 30 + name_length + extra_length) % 64 == 0


def test_one_reference_twice_is_one_storage() -> None:
    ref = reference("w", some("float32", 4))
    parts = lay_out_archive({"a": ref, "b": ref})
    assert sum(isinstance(part, Data) for part in parts) == 1


def test_beyond_four_gigabytes_sizes_have_sixty_four_bits() -> None:
    """Without the data: the directory says where it would be."""
    shape = (5 << 28, 4)
    place = Extent("f", 0, (16, 4))
    big = TensorEntry("w", ("w",), BY_NAME["float32"], shape, (Chunk(Box.whole(shape), place),))
    parts = lay_out_archive({"w": TensorRef.whole(big)})
    assert isinstance(parts[-1], Literal)
    directory = parts[-1].data
    at = directory.find(b"PK\x01\x02")
    entries = []
    while directory[at : at + 4] == b"PK\x01\x02":
        size, name, extra, comment = struct.unpack_from("<4xL3H", directory, at + 20)
        entries.append((size, directory[at + 46 + name : at + 46 + name + extra]))
        at += 46 + name + extra + comment
    wide = [extra for size, extra in entries if size == 0xFFFFFFFF]
    assert len(wide) == 1
    assert struct.unpack_from("<2H2Q", wide[0])[2:] == (20 << 30, 20 << 30)


def test_a_tensor_that_repeats_an_element_beyond_any_file_is_refused() -> None:
    """A stride of 0 makes any shape of four bytes."""
    shape = (1 << 32, 1 << 32)
    chunk = Chunk(Box.whole(shape), Extent("f", 0, (0, 0)))
    entry = TensorEntry("w", ("w",), BY_NAME["float32"], shape, (chunk,))
    with pytest.raises(Unsupported, match="no file can hold it"):
        lay_out_archive({"w": TensorRef.whole(entry)})
