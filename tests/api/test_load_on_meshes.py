"""The shards that each rank of a mesh loads, one rank at a time in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import bits
from safetensors.torch import save_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as Shards
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptool
from ckptool.dcp import CheckpointReader
from ckptool.errors import Unsupported

TRUTH = {
    "embed.weight": torch.arange(5 * 4.0).reshape(5, 4),
    "norm.weight": torch.arange(3.0) + 1,
    "seen": torch.tensor(7),
}


class Model(torch.nn.Module):
    """Rows and elements for too many ranks, a tied head, a buffer that is on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.RMSNorm(3)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0))


@pytest.fixture(params=range(4))
def rank(request: Any) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it keeps meshes, which know the rank


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_file(TRUTH, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def right(state: dict[str, Any], mesh: DeviceMesh, cut: list[Any]) -> None:
    """Whether every local tensor is torch's own cut of the truth."""
    for name, tensor in state.items():
        truth = TRUTH[name.removeprefix("_orig_mod.").replace("head", "embed")]
        local = tensor
        if hasattr(tensor, "to_local"):
            local = tensor.to_local()
            truth = distribute_tensor(truth, mesh, cut, src_data_rank=None).to_local()
        assert bits(local) == bits(truth), name


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", ["4", "2x2"])
def test_fsdp2_with_tied_parameters(saved: Path, rank: int, shape: str, compiled: bool) -> None:
    sizes = tuple(map(int, shape.split("x")))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    model: Any = fully_shard(Model(), mesh=mesh)
    model = torch.compile(model) if compiled else model
    cut = [Shard(0)] if shape == "4" else [Replicate(), Shard(0)]
    names = {"rename": "^=_orig_mod."} if compiled else {}
    report = ckptool.load(saved, model.state_dict(), **names)  # type: ignore[arg-type]
    assert not report.missing
    right(model.state_dict(), mesh, cut)
    plain: dict[str, Any] = get_model_state_dict(model)
    del plain["head.weight"]
    for tensor in plain.values():
        getattr(tensor, "_local_tensor", tensor).zero_()
    dcp.load(plain, storage_reader=CheckpointReader(saved), no_dist=True)
    right(plain, mesh, cut)


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(1), Replicate()],
    ],
    ids=str,
)
def test_two_cuts(saved: Path, rank: int, placements: list[Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "embed.weight": distribute_tensor(torch.zeros(5, 4), mesh, placements, src_data_rank=None)
    }
    ckptool.load(saved, state, strict=False)
    right(state, mesh, placements)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_shards_of_fsdp1(saved: Path, rank: int) -> None:
    """Two shards for rank 1, none for rank 3."""
    owners = (0, 1, 1, 2, 0)
    shards = [ShardMetadata([n, 0], [1, 4], f"rank:{owner}/cpu") for n, owner in enumerate(owners)]
    kind = TensorProperties(dtype=torch.float32)
    own = [
        Shards(torch.zeros(1, 4), one)
        for one, owner in zip(shards, owners, strict=True)
        if owner == rank
    ]
    made = ShardedTensor._init_from_local_shards_and_global_metadata(
        own, ShardedTensorMetadata(shards, torch.Size([5, 4]), kind)
    )
    ckptool.load(saved, {"embed.weight": made}, strict=False)
    for shard in made.local_shards():
        row = shard.metadata.shard_offsets[0]
        assert torch.equal(shard.tensor, TRUTH["embed.weight"][row : row + 1])


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_addends_are_refused(saved: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    state = {
        "embed.weight": torch.distributed.tensor.DTensor.from_local(
            torch.zeros(5, 4), mesh, [Partial()], run_check=False
        )
    }
    with pytest.raises(Unsupported, match="a partial placement: each rank holds an addend"):
        ckptool.load(saved, state, strict=False)
