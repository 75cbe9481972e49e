"""An archive similar to one read before is read as if it were the first."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.errors import CkptoolError
from ckptool.serialization.archive import read
from ckptool.serialization.archive.read import TorchFile, find_template, read_torch_zip
from ckptool.serialization.archive.templates import Templates
from ckptool.serialization.source import NearReads
from ckptool.serialization.zip import Region
from ckptool.storage.local import LocalSource

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.complex64]


def saved(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> bytes:
    values = torch.randint(-100, 100, (rows, columns), generator=torch.manual_seed(seed))
    stream = io.BytesIO()
    torch.save(values.to(dtype), stream)
    return stream.getvalue()


def outcome(folder: Path, data: bytes, before: bytes = b"junk") -> TorchFile | str:
    """What an archive in the middle of a file is read as, or why it is not."""
    (folder / "items").write_bytes(before + data)
    try:
        region = Region(NearReads(LocalSource.folder(folder)), "items", len(before), len(data))
        return read_torch_zip(region)
    except CkptoolError as error:
        return str(error.message)


def both(folder: Path, data: bytes, **place: bytes) -> tuple[TorchFile | str, TorchFile | str]:
    """The outcome as things are, and with nothing known."""
    now = outcome(folder, data, **place)
    read._TEMPLATES = Templates(reads=False)
    return now, outcome(folder, data, **place)


@settings(max_examples=30)
@given(data=st.data())
def test_one_of_the_same_shape_and_type_is_read_as_it_is(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("alike")
    shapes = st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from(DTYPES))
    seeds = data.draw(st.lists(st.tuples(st.integers(0, 9), shapes), min_size=2, max_size=4))
    for seed, (rows, columns, dtype) in seeds:
        outcome(folder, saved(seed, rows, columns, dtype))
    seed, (rows, columns, dtype) = data.draw(st.sampled_from(seeds))
    now, fresh = both(folder, saved(seed + 10, rows, columns, dtype), before=b"a")
    assert now == fresh


def test_it_is_known(tmp_path: Path) -> None:
    read._TEMPLATES = Templates(reads=False)
    assert isinstance(outcome(tmp_path, saved(1, 300, 20)), TorchFile)
    (tmp_path / "items").write_bytes(saved(2, 300, 20))
    region = Region(NearReads(LocalSource.folder(tmp_path)), "items", 0, len(saved(2, 300, 20)))
    template = find_template(region)
    assert template is not None
    assert template.file is not None
    assert read_torch_zip(region).inert is template.file.inert


@pytest.mark.parametrize("rows", [2, 300], ids=["all at hand", "both ends at hand"])
def test_a_changed_byte_changes_the_same_as_in_the_first(rows: int, tmp_path: Path) -> None:
    whole = saved(1, rows, 20)
    end = len(whole)
    for at in [*range(0, min(1000, end), 7), *range(max(0, end - 1300), end, 7)]:
        changed = whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]
        outcome(tmp_path, whole)
        now, fresh = both(tmp_path, changed)
        assert now == fresh, at
