"""Run by one torch: ``torch_side.py save FOLDER`` writes, ``torch_side.py load FOLDER`` reads back.

Alone in a process of another torch than the tests': it knows nothing of ckptool.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def state() -> dict[str, dict[str, object]]:
    torch.manual_seed(7)
    model = {str(kind).removeprefix("torch."): (torch.randn(6, 5) * 9).to(kind) for kind in TYPES}
    return {
        "model": {**model, "row": torch.arange(12.0).reshape(3, 4)[1], "scalar": torch.tensor(3.5)},
        "progress": {"step": 7, "name": "run", "sizes": [1, 2, 3]},
    }


def save(folder: Path) -> None:
    dcp.save(state(), checkpoint_id=folder / "dcp")
    torch.save(state(), folder / "zip.pt")
    torch.save(state(), folder / "legacy.pt", _use_new_zipfile_serialization=False)


def load(folder: Path) -> None:
    expected = state()
    require_equal(torch.load(folder / "torch-save.pt", weights_only=True), expected)
    found = state()
    for tensor in found["model"].values():
        tensor.zero_()  # type: ignore[attr-defined]
    dcp.load(found, checkpoint_id=folder / "from-zip")
    require_equal(found, expected)


def on_one_rank() -> DeviceMesh:
    """Start a job of one process, and return its device mesh."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def save_rank(folder: Path) -> None:
    """Save a rank's file with a DTensor (torch 2.5 or later)."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(6.0).reshape(3, 2)
    (folder / "ranks").mkdir()
    tensor = distribute_tensor(whole, on_one_rank(), [Shard(0)])
    torch.save({"w": tensor}, folder / "ranks" / "checkpoint_0.pt")


def save_meshes(folder: Path) -> None:
    """Save a DTensor on meshes of eight ranks, as rank 5 does, each in a job of its own."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for shape in ((8,), (2, 4), (1, 8), (8, 1), (2, 1, 4)):
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
        tensor = distribute_tensor(torch.zeros(2), mesh, [Replicate()] * len(shape))
        torch.save({"w": tensor}, folder / f"mesh-{'x'.join(map(str, shape))}.pt")
        dist.destroy_process_group()


def load_rank(folder: Path) -> None:
    """Copy the DTensors of such files into a parameter, as ``load_state_dict`` does."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, whole = on_one_rank(), torch.arange(6.0).reshape(3, 2)
    for file in ("ranks/checkpoint_0.pt", "rank-local/checkpoint_0.pt", "items/model_0.pt"):
        found = torch.load(folder / file, weights_only=False)["w"]
        parameter: Any = torch.nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
        with torch.no_grad():
            parameter.copy_(found)
        assert torch.equal(parameter.full_tensor(), whole), file


def require_equal(found: dict[str, dict[str, object]], expected: object) -> None:
    assert isinstance(expected, dict)
    assert found["progress"] == expected["progress"]
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        other = found["model"][name]
        assert isinstance(other, torch.Tensor)
        assert other.dtype == tensor.dtype, name
        assert torch.equal(other, tensor), name


if __name__ == "__main__":
    words = {"save": save, "load": load, "save-rank": save_rank, "load-rank": load_rank}
    words |= {"save-meshes": save_meshes}
    words[sys.argv[1]](Path(sys.argv[2]))
