"""Runs of reshard, and what they made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import Reshard, ReshardReport, prepare_reshard
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.formats import targets

MESHES = ("2", "3", "2x2", "2x4", "2x2x2")


WRITERS = targets(mesh=True)


def options(mesh: str, **more: Any) -> ReshardOptions:
    run = RunOptions(workers=2, fsync=False)
    transfer = TransferOptions(
        more.pop("overwrite", False), more.pop("resume", False), more.pop("verify", True), run
    )
    rules = tuple(map(parse_rule, more.pop("rules", ())))
    return ReshardOptions(mesh=parse_mesh(mesh), rules=rules, transfer=transfer, **more)


def prepared(source: Path, target: Path | None, mesh: str, **more: Any) -> Reshard:
    return prepare_reshard(source, target, options(mesh, **more))


def reshard(source: Path, target: Path, mesh: str, **more: Any) -> ReshardReport:
    return prepared(source, target, mesh, **more).run()


RULES = [
    ("2x4", ("*.w=Shard(0),Shard(1)",)),
    ("2x4", ("*.w=Shard(1),Shard(0)", "*.cube=Shard(2),Shard(-3)")),
    ("2x2", ("*.w=StridedShard(0,2),Shard(0)", "*.cube=Shard(1),Replicate()")),
    ("4x2", ("*.bias=StridedShard(0,2),Shard(0)",)),
    ("2", ("*.bias=StridedShard(0,3)", "*.cube=StridedShard(2,2)")),
    ("2x2x2", ("*.w=Shard(0),Shard(0),Shard(1)",)),
    ("2x2x2x2", ("*.w=Shard(0),Shard(1),Shard(0),Shard(1)",)),
    ("dp=2,tp=2", ("*.w=colwise", "*.cube=rowwise")),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that torch wrote: uneven, empty, 0-d, several types, values."""
    path = tmp_path_factory.mktemp("source") / "ckpt"
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    state = {
        "model": {
            "w": random(10, 7),
            "wide": random(3, 40).to(torch.bfloat16),
            "cube": random(5, 4, 6),
            "bias": random(9),
            "one": random(1),
            "none": torch.empty(0, 4),
            "seen": torch.tensor(3),
            "mask": torch.arange(11) % 3 == 0,
        },
        "optim": {"state": {"w": {"exp_avg": random(10, 7), "step": torch.tensor(5.0)}}},
        "lr": 0.125,
        "betas": (0.9, 0.95),
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path
