"""One rank of several: load checkpoints onto meshes, and record differences from the truth.

Usage: ``load_workers.py OUT LOADS``, started once per rank with torchrun's environment. LOADS is a
JSON array of meshes, each with the placements of its dims, and an object of checkpoints and their
truth (safetensors files). ``OUT/rank-{r}.json`` lists, by load, the tensors that differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckptool
from ckptool.dcp import CheckpointReader

State = dict[str, Any]


def by_load(source: str, state: State) -> None:
    ckptool.load(source, state, strict=False)


def by_dcp(source: str, state: State) -> None:
    dcp.load(state, storage_reader=CheckpointReader(source))


WAYS: dict[str, Callable[[str, State], None]] = {"load": by_load, "dcp": by_dcp}


def main() -> None:
    out, loads = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    found: dict[str, list[str]] = {}
    for shape, placements, sources in loads:
        mesh = init_device_mesh("cpu", tuple(map(int, shape.split("x"))))
        for source, truth in sources.items():
            for way, load in WAYS.items():
                name = f"{way} {Path(source).parent.name} {shape} {placements}"
                found[name] = differing(load, source, truth_of(Path(truth)), mesh, placements)
    for way, load in WAYS.items():
        found[f"{way} into FSDP2 over tensor parallelism"] = trained(load, out)
        found[f"{way} of a part"] = partial(load, out)
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()  # gloo may end a rank whose peer leaves first
    dist.destroy_process_group()


def truth_of(file: Path) -> State:
    """The tensors; a fixture's file has only their bytes, and a file beside it describes them."""
    held, facts = load_file(file), file.with_suffix(".json")
    if not facts.exists():
        return held
    said = json.loads(facts.read_text())["tensors"]
    kinds = {name: (getattr(torch, t["dtype"]), t["shape"]) for name, t in said.items()}
    return {n: held[n].view(dtype).reshape(shape) for n, (dtype, shape) in kinds.items()}


def placed(tensor: Any, mesh: DeviceMesh, placements: list[int | None]) -> Any:
    """The shard as torch itself cuts it; a dim that the tensor lacks is not cut."""
    cut = [
        Shard(dim) if dim is not None and dim < tensor.ndim else Replicate() for dim in placements
    ]
    return distribute_tensor(tensor, mesh, cut, src_data_rank=None)


def differing(
    load: Callable[[str, State], None],
    source: str,
    truth: State,
    mesh: DeviceMesh,
    placements: list[int | None],
) -> list[str]:
    """The tensors of which this rank's shard is not torch's own cut of the truth."""
    state = {name: placed(torch.zeros_like(t), mesh, placements) for name, t in truth.items()}
    load(source, state)
    return [
        name
        for name, tensor in truth.items()
        if not same(state[name].to_local(), placed(tensor, mesh, placements).to_local())
    ]


def same(one: Any, other: Any) -> bool:
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.shape == other.shape and torch.equal(*bits)


class Network(torch.nn.Module):
    """Linear layers of sizes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(9, 13)
        self.down = torch.nn.Linear(13, 7)


def trained(load: Callable[[str, State], None], out: Path) -> list[str]:
    """The parameters of a model under FSDP2 and tensor parallelism that differ from the truth."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    network = Network()
    parallelize_module(network, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (network.up, network.down):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh["dp"])
    load(str(out / "network" / "model.pt"), network.state_dict())
    truth = torch.load(out / "network" / "model.pt", weights_only=True)
    return [n for n, t in network.state_dict().items() if not same(t.full_tensor(), truth[n])]


def partial(load: Callable[[str, State], None], out: Path) -> list[str]:
    """The problems after loading a state dict with a name that the checkpoint lacks."""
    source = str(out / "network" / "model.pt")
    state = {"up.weight": torch.zeros(13, 9), "new": torch.ones(2)}
    if load is by_load:
        report = ckptool.load(source, state, strict=False)
        wrong = [] if report.missing == ("new",) else ["missing"]
    else:
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, storage_reader=CheckpointReader(source), planner=planner)
        wrong = []
    truth = torch.load(source, weights_only=True)
    kept = torch.equal(state["new"], torch.ones(2))
    return wrong + ([] if kept and same(state["up.weight"], truth["up.weight"]) else ["values"])


if __name__ == "__main__":
    main()
