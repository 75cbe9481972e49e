"""Tensors, and the placements that are chosen for them."""

from __future__ import annotations

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Mesh, Placements, Replicate, Shard, StridedShard
from ckptool.core.sharding.placement import (
    Choice,
    Placer,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)


STRIDED = StridedShard(0, 2)


def entry(
    name: str = "w",
    shape: tuple[int, ...] = (8, 6),
    placements: Placements | None = None,
    mesh: Mesh | None = None,
) -> TensorEntry:
    return TensorEntry(name, (name,), BY_NAME["float32"], shape, (), placements, mesh)


def choose(placer: Placer, *entries: TensorEntry, mesh: Mesh | None = None) -> dict[str, Choice]:
    catalog = Catalog("dcp", {one.name: one for one in entries}, {}, {}, mesh=mesh)
    return placer.choose(catalog)
