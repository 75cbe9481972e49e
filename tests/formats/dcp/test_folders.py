"""torch.distributed.checkpoint folders unlike any fixture."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptool
from ckptool.errors import Damaged, Unsupported


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)


def test_metadata_of_each_rank_beside_that_of_all_is_another_save(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    (tmp_path / "__0.metadata").write_bytes((tmp_path / ".metadata").read_bytes())
    (note,) = ckptool.open(tmp_path).catalog.notes
    assert "__0.metadata is not read" in note


def test_a_name_inside_a_value_is_no_other_tensors(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": {"w": torch.ones(3)}, "model.w": torch.zeros(3)}
    save(state, tmp_path, planner=planner)
    read = ckptool.open(tmp_path)
    values = sorted(read.read(name).tolist() for name in read.tensors)
    assert values == [[0, 0, 0], [1, 1, 1]]
    assert "model.w" in read.tensors


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_a_quantized_tensor_is_read_in_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    """And does not keep the others from being read."""
    whole = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, dtype)
    save({"w": whole, "b": torch.ones(2)}, tmp_path)
    checkpoint = ckptool.open(tmp_path)
    assert torch.equal(checkpoint.read("w.int_repr"), whole.int_repr())
    assert checkpoint.objects["w.q_zero_point"] == whole.q_zero_point()
    assert torch.equal(checkpoint.read("b"), torch.ones(2))
    assert ckptool.verify(tmp_path).ok


@pytest.mark.parametrize("count", [1, 3, 200])
def test_a_chunk_that_says_more_than_is_known_is_refused(count: int, tmp_path: Path) -> None:
    """What another field says may change where the elements belong."""
    state = {f"w{number}": torch.ones(4, 4) for number in range(count)}
    dcp.save(state, checkpoint_id=tmp_path / "m", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "m").read_metadata()
    for entry in metadata.state_dict_metadata.values():
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            object.__setattr__(chunk, "transposed", True)
    (tmp_path / "m" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Unsupported, match=r"\.metadata: w0: a chunk with 'transposed'"):
        ckptool.convert(tmp_path / "m", tmp_path / "out", to="dcp")


def test_chunks_of_other_dims_than_their_tensor_are_refused_by_every_writer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save({"a": torch.ones(5, 4), "b": torch.ones(5, 4)}, source)
    with (source / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata["a"].size = torch.Size([0])  # the first of alike tensors
    (source / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    for to in ("dcp", "dcp-safetensors", "safetensors"):
        with pytest.raises(Damaged, match=r"a: chunk \[0:5, 0:4\] is outside shape \[0\]"):
            ckptool.convert(source, tmp_path / "out", to=to)


def test_metadata_that_is_no_number_is_named_with_its_file(tmp_path: Path) -> None:
    save({"a": torch.ones(5)}, tmp_path)
    with (tmp_path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.offset = -1
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    with pytest.raises(Damaged, match=r"^\.metadata: expected a size or offset, got -1"):
        ckptool.open(tmp_path)
