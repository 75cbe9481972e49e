"""One rank of several: save the ranks' joint state, and record what was refused.

Usage: ``save_workers.py OUT``, started once per rank with torchrun's environment. ``OUT/ours`` and
``OUT/theirs`` are the saves of ckptool and of torch, ``OUT/whole.pt`` has the tensors whole;
``OUT/rank-{r}.json`` records how each save that must be refused ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ckptool
from ckptool.errors import CkptoolError


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = state_on(mesh)
    report = ckptool.save(state, out / "ours", to="dcp", fsync=False)
    assert report.written
    dcp.save(state, checkpoint_id=out / "theirs")
    for to in ("dcp", "dcp-safetensors"):
        ckptool.save(stage_on(mesh), out / f"stages-{to}", to=to, fsync=False)
    if rank == 0:
        ckptool.save({"alone": torch.ones(2)}, out / "alone.safetensors", fsync=False)
    whole = {name: t.full_tensor() for name, t in state["model"].items() if isinstance(t, DTensor)}
    if rank == 0:
        torch.save(whole, out / "whole.pt")
    refused = {
        "again": lambda: ckptool.save(state, out / "ours", to="dcp"),
        "one file": lambda: ckptool.save(state, out / "m.safetensors"),
        "values": lambda: ckptool.save({**state, "seed": rank}, out / "m", to="dcp"),
        "kinds": lambda: ckptool.save(
            {**state, "seed": 5 if rank else torch.ones(3)}, out / "m", to="dcp"
        ),
        "places": lambda: ckptool.save(
            state | ({"rng.seed": 5} if rank else {"rng": {"seed": 5}}), out / "m", to="dcp"
        ),
        "replicas": lambda: ckptool.save(
            {**state, "buffer": torch.tensor([1.0, rank // 2])}, out / "m", to="dcp"
        ),
        "shapes": lambda: ckptool.save(
            {**state, "buffer": torch.ones(1 + rank // 3)}, out / "m", to="dcp"
        ),
        "partial": lambda: ckptool.save(
            {"sum": DTensor.from_local(torch.ones(2), mesh, [Partial()] * 2)}, out / "m", to="dcp"
        ),
    }  # fmt: skip
    ends = {name: end_of(save) for name, save in refused.items()}
    (out / f"rank-{rank}.json").write_text(json.dumps(ends))
    dist.barrier()  # gloo may end a rank whose peer leaves first
    dist.destroy_process_group()


def state_on(mesh: DeviceMesh) -> dict[str, Any]:
    """What FSDP2, HSDP and tensor parallelism leave in a state dict, in sizes that nothing divides.

    Pipelines give ranks names of their own.
    """
    generator = torch.Generator().manual_seed(3)

    def cut(*shape: int, by: list[Any], dtype: torch.dtype = torch.float32) -> DTensor:
        whole = torch.randn(shape, generator=generator).to(dtype)
        return distribute_tensor(whole, mesh, by, src_data_rank=None)

    rank = dist.get_rank()
    return {
        "model": {
            "rows": cut(9, 5, by=[Shard(0), Shard(0)]),
            "both": cut(7, 6, by=[Shard(0), Shard(1)], dtype=torch.bfloat16),
            "hybrid": cut(8, 3, by=[Replicate(), Shard(0)]),
            "copied": cut(3, by=[Replicate(), Replicate()]),
            "short": cut(1, 4, by=[Shard(0), Shard(1)]),
            "buffer": torch.arange(6).reshape(2, 3).T,
            f"stage{rank // 2}": torch.full((2,), float(rank // 2)),
        },
        "optimizer": {"state": [{"step": torch.tensor(4.0)}], "betas": (0.9, float("nan"))},
        "step": 4,
    }


def stage_on(mesh: DeviceMesh) -> dict[str, Any]:
    """A pipeline of which only the first stage is sharded; its last rank holds nothing."""
    if dist.get_rank() < 2:
        tensors = {"first": torch.arange(7.0), "none": torch.empty(0, 4)}
        return {n: distribute_tensor(t, mesh["tp"], [Shard(0)]) for n, t in tensors.items()}
    return {"second": torch.arange(3)} if dist.get_rank() == 2 else {}


def end_of(save: Any) -> str:
    try:
        save()
    except CkptoolError as error:
        return f"{type(error).__name__}: {error.message}; {error.hint}"
    return "written"


if __name__ == "__main__":
    main()
