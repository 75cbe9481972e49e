"""DCP folders without some of their files: one finding that names the cause, and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptool
from ckptool.commands.verify.codes import Severity
from ckptool.commands.verify.findings import Finding
from ckptool.errors import Damaged

FOUR = "dcp_no_collectives"
Copy = Callable[[str], Path]


@pytest.fixture
def four(copy_of: Copy) -> Path:
    """A save of four ranks, with one data file each."""
    folder = copy_of("dcp_fsdp2_tp")
    assert sorted(file.name for file in folder.glob("*.distcp")) == [
        f"__{rank}_0.distcp" for rank in range(4)
    ]
    return folder


def lose(folder: Path, *ranks: int) -> None:
    for rank in ranks:
        (folder / f"__{rank}_0.distcp").unlink()


def error_of(folder: Path) -> Finding:
    """The one error that verify finds; opening raises it too, with the same next step."""
    (found,) = (f for f in ckptool.verify(folder).findings if f.severity is Severity.ERROR)
    with pytest.raises(Damaged) as caught:
        ckptool.open(folder).tensors  # noqa: B018
    assert caught.value.hint == found.hint
    return found


def test_a_node_with_the_metadata(four: Path) -> None:
    lose(four, 2, 3)
    found = error_of(four)
    assert found.code == "rank-missing"
    assert "only those of ranks 0, 1 are here, none of ranks 2, 3" in found.message
    assert found.hint is not None
    assert "copy the files of all nodes into one folder" in found.hint


def test_a_node_without_the_metadata(four: Path) -> None:
    lose(four, 0, 1)
    (four / ".metadata").unlink()
    found = error_of(four)
    assert found.code == "rank-missing"
    assert "the files of ranks 2, 3 of a DCP folder, as one node has them" in found.message
    assert found.hint is not None
    assert "copy the files of all nodes" in found.hint
    assert "use the previous checkpoint" in found.hint


def test_all_files_without_the_metadata_are_an_unfinished_save(four: Path) -> None:
    (four / ".metadata").unlink()
    found = error_of(four)
    assert (found.code, found.hint is not None) == ("save-incomplete", True)
    assert "never finished" in found.message


def test_metadata_in_a_folder_below_is_named(four: Path) -> None:
    (four / "meta").mkdir()
    (four / ".metadata").rename(four / "meta" / ".metadata")
    found = error_of(four)
    assert found.code == "file-missing"
    assert "without its .metadata; one lies in meta/.metadata" in found.message


def test_metadata_without_any_file(four: Path) -> None:
    lose(four, 0, 1, 2, 3)
    assert "no data file is here" in error_of(four).message


def test_one_lost_file_is_still_that_file(four: Path) -> None:
    lose(four, 3)
    found = error_of(four)
    assert (found.code, found.file) == ("file-missing", "__3_0.distcp")


def test_another_fault_beside_it_is_another_finding(four: Path) -> None:
    lose(four, 2, 3)
    (four / "__1_0.distcp").write_bytes(b"")
    found = {f.code for f in ckptool.verify(four).findings if f.severity is Severity.ERROR}
    assert found == {"rank-missing", "file-empty"}


def test_a_file_in_a_folder_below_is_named(four: Path) -> None:
    (four / "node1").mkdir()
    (four / "__1_0.distcp").rename(four / "node1" / "__1_0.distcp")
    found = error_of(four)
    assert (found.code, found.file) == ("file-missing", "__1_0.distcp")
    assert "it lies in another folder: node1/__1_0.distcp" in found.message
    assert found.hint == f"move the .distcp files of node1 into {four}"
    (four / "node1" / "__1_0.distcp").rename(four / "__1_0.distcp")
    assert ckptool.verify(four).ok


def test_files_in_folders_of_their_nodes_are_one_finding(four: Path) -> None:
    for node in range(2):
        (four / f"node{node}").mkdir()
        for rank in (2 * node, 2 * node + 1):
            name = f"__{rank}_0.distcp"
            shutil.move(four / name, four / f"node{node}" / name)
    found = error_of(four)
    assert "4 files that .metadata names are missing here, and lie in other folders" in (
        found.message
    )
    assert found.hint == f"move the .distcp files of node0, node1 into {four}"


def save_alone(folder: Path, rank: int, tensors: int) -> None:
    """What one of four ranks has of a model under FSDP2, as it saves without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        state = {
            f"layers.{n}": DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
            for n in range(tensors)
        }
        dcp.save({"model": state, "step": 3}, checkpoint_id=folder, no_dist=True)
        torch.save({"model": state}, folder / "alone.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_saved_alone_is_one_finding(rank: int, tmp_path: Path) -> None:
    save_alone(tmp_path / "ck", rank, 12)
    (tmp_path / "ck" / "alone.pt").rename(tmp_path / "alone.pt")
    (found,) = (f for f in ckptool.verify(tmp_path / "ck").findings)
    assert found.code == "rank-missing"
    assert "only rank 0 saved its shards: 12 tensors hold 72 of 288 elements" in found.message
    assert found.count == 12
    assert found.hint is not None
    assert "each has to call the save" in found.hint
    with pytest.raises(Damaged, match="only rank 0 saved its shards") as caught:
        ckptool.convert(tmp_path / "ck", tmp_path / "out.safetensors")
    assert caught.value.hint == found.hint
    (of_file,) = (f for f in ckptool.verify(tmp_path / "alone.pt").findings if f.count > 1)
    assert of_file.code == "rank-missing"
    assert f"only rank {rank} saved its shards" in of_file.message


def test_one_tensor_with_a_gap_is_that_tensor(tmp_path: Path) -> None:
    save_alone(tmp_path / "ck", 0, 1)
    (tmp_path / "ck" / "alone.pt").unlink()
    (found,) = ckptool.verify(tmp_path / "ck").findings
    assert (found.code, found.tensor) == ("chunk-gap", "model.layers.0")
