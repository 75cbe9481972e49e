"""Rank files of a reshard, and ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.run import RunOptions
from ckptool.core.catalog import Catalog
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Layout
from ckptool.core.mesh import Placements, Replicate, Shard, StridedShard
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.placement import PlacedTensors, Placer, parse_mesh
from ckptool.engine.write.run import run
from ckptool.engine.write.work import Work
from ckptool.formats.base import Request
from ckptool.formats.rank_files.write import lay_out_rank_files

Writer = Callable[[Catalog, Request], Layout]


OF_TORCH = sorted(name for name, kind in BY_NAME.items() if kind.is_of_torch)


def reshard(
    source: Path,
    target: Path,
    mesh: str,
    placements: dict[str, Placements] | None = None,
    writer: Writer = lay_out_rank_files,
) -> Layout:
    """Write a checkpoint for a mesh, as its source (or ``placements`` by name) places it."""
    opened = open_checkpoint(source, ReadOptions(per_rank=True))
    catalog = opened.open_containers(opened.catalog)
    parsed = parse_mesh(mesh)
    chosen = {name: c.placements for name, c in Placer(parsed).choose(catalog).items()}
    layout = writer(
        catalog, Request("m", placed=PlacedTensors(parsed, chosen | (placements or {})))
    )
    target.mkdir()
    plan, options = Plan(catalog, layout), RunOptions(workers=2, fsync=False)
    run(Work(plan, opened.source, options, range(len(layout.files))), target)
    return layout


def saved(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "source.pt")
    return folder / "source.pt"


def as_torch(placements: Placements) -> list[Any]:
    kinds = {
        Shard: lambda p: TorchShard(p.dim),
        StridedShard: lambda p: TorchStridedShard(p.dim, split_factor=p.split_factor),
        Replicate: lambda p: TorchReplicate(),
    }
    return [kinds[type(placement)](placement) for placement in placements]


@contextmanager
def rank_of_a_job(rank: int, world: int) -> Iterator[None]:
    """A torch job of which only this rank exists; its groups are made, its transport is not."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
