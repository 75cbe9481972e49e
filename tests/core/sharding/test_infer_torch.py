"""Placements on meshes of three dims, against the plans that torch makes for each rank."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import local_shards
from ckptool.core.sharding.infer import infer, with_inferred_mesh

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    create_default_local_save_plan,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor import Replicate as TorchReplicate  # noqa: E402
from torch.distributed.tensor import Shard as TorchShard  # noqa: E402
from torch.distributed.tensor._utils import (  # noqa: E402
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

Placements = tuple[Placement, ...]
SHAPE = (16, 24)


def every_triple(mesh: tuple[int, ...]) -> list[Placements]:
    """All of Shard and Replicate, and those of FSDP outside the shards of tensor parallelism."""
    rows, inner = Shard(0), mesh[2]
    plain: tuple[Placement, ...] = (Replicate(), rows, Shard(1))
    return [
        *itertools.product(plain, repeat=3),
        (Replicate(), StridedShard(0, inner), rows),
        (StridedShard(0, mesh[1] * inner), rows, rows),
        (StridedShard(0, mesh[1]), rows, Replicate()),
        (StridedShard(0, inner), Replicate(), rows),
    ]


def to_torch(placement: Placement) -> Any:
    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return TorchShard(placement.dim) if isinstance(placement, Shard) else TorchReplicate()


def rank_plan(rank: int, shape: tuple[int, ...], triples: list[Placements]) -> Any:
    """What a rank of a mesh would save; no process but this one is needed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = math.prod(shape)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh, state = init_device_mesh("cpu", shape), {}
        for number, placements in enumerate(triples):
            spelt = [to_torch(one) for one in placements]
            local, _ = compute_local_shape_and_global_offset(torch.Size(SHAPE), mesh, spelt)
            stride = (SHAPE[1], 1)
            state[f"t{number}"] = DTensor.from_local(
                torch.zeros(local), mesh, spelt, shape=torch.Size(SHAPE), stride=stride
            )
        return create_default_local_save_plan(state, rank == 0)
    finally:
        dist.destroy_process_group()


def saved(mesh: tuple[int, ...], *, lowest: bool) -> Iterator[TensorEntry]:
    """The tensors as DCP stores them, each chunk with the one rank that writes it."""
    triples = every_triple(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = [rank_plan(rank, mesh, triples) for rank in range(math.prod(mesh))]
    plans = dedup_save_plans(local, lowest)
    nowhere = Extent("file", 0, (0, 0))
    chunks: dict[str, list[Chunk]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            low = tuple(chunk.offsets)
            box = Box(low, tuple(map(sum, zip(low, chunk.sizes, strict=True))))
            chunks.setdefault(item.index.fqn, []).append(Chunk(box, nowhere, rank))
    for number in range(len(triples)):
        name = f"t{number}"
        yield TensorEntry(name, (name,), BY_NAME["float32"], SHAPE, tuple(chunks[name]))


def rows_of(mesh: tuple[int, ...], placements: Placements) -> list[Any]:
    return [shard.pieces for shard in local_shards(SHAPE, mesh, placements)]


@pytest.mark.parametrize("lowest", [True, False], ids=["lowest rank", "balanced"])
@pytest.mark.parametrize("mesh", [(2, 2, 2), (2, 1, 4)])
def test_every_triple_of_placements_is_among_those_that_fit(
    mesh: tuple[int, ...], lowest: bool
) -> None:
    tensors = list(saved(mesh, lowest=lowest))
    inference = infer(tensors, math.prod(mesh))
    assert inference.mesh is not None
    assert inference.mesh.shape == tuple(size for size in mesh if size > 1)
    alone = 0
    for tensor, placements in zip(tensors, every_triple(mesh), strict=True):
        fits = inference.placements[tensor.name]
        held = [rows_of(inference.mesh.shape, each) for each in fits]
        assert rows_of(mesh, placements) in held
        alone += len(fits) == 1
    assert alone >= len(tensors) - (0 if lowest else 2)


def test_tensors_whose_placements_are_not_determined_are_counted() -> None:
    """Each chunk is on four ranks, and the two that wrote them differ in two mesh dims."""
    tensors = {entry.name: entry for entry in saved((2, 2, 2), lowest=False)}
    catalog = with_inferred_mesh(Catalog("dcp", tensors, {}, {}, world_size=8))
    without = [name for name, entry in catalog.tensors.items() if entry.placements is None]
    assert catalog.notes == (
        f"the placements of {len(without)} tensors are ambiguous: the ranks that wrote"
        f" {without[0]} hold its chunks with Replicate() Replicate() Shard(0)"
        " or Shard(0) Replicate() Replicate()",
    )
    kept = {name: replace(e) for name, e in tensors.items() if name not in without}
    assert with_inferred_mesh(Catalog("dcp", kept, {}, {}, world_size=8)).notes == ()
