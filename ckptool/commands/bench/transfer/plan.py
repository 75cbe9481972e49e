"""Plan the reshard of a checkpoint too large to write here: a process of its own, to be measured.

``python -m ckptool.commands.bench.transfer.plan TENSORS CHUNKS MESH [RANK WORLD_SIZE]``
"""

from __future__ import annotations

import gc
import sys

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Shard
from ckptool.core.plan import Plan
from ckptool.core.sharding.placement import Placed, parse_mesh
from ckptool.engine.ranks import share_files
from ckptool.formats import FORMATS
from ckptool.formats.base import Request
from ckptool.storage.local import TILE

_COLUMNS = 4096
_ROWS_A_CHUNK = 4
_ITEM = 70_000


def synthetic(tensors: int, chunks: int) -> Catalog:
    """A DCP checkpoint of ``chunks`` ranks, each with some rows of each of ``tensors`` tensors."""
    entries = {}
    for number in range(tensors):
        name = f"layers.{number}.weight"
        held = tuple(
            Chunk(
                Box((rank * _ROWS_A_CHUNK, 0), ((rank + 1) * _ROWS_A_CHUNK, _COLUMNS)),
                Extent(f"__{rank}_0.distcp", number * _ITEM + 704, (_COLUMNS * 4, 4)),
                rank,
            )
            for rank in range(chunks)
        )
        shape = (chunks * _ROWS_A_CHUNK, _COLUMNS)
        path = ("layers", str(number), "weight")
        entries[name] = TensorEntry(name, path, BY_NAME["float32"], shape, held)
    files = {f"__{rank}_0.distcp": tensors * _ITEM for rank in range(chunks)}
    return Catalog("dcp", entries, {}, files, chunks)


def plan(tensors: int, chunks: int, mesh: str, rank: int = 0, world_size: int = 1) -> Plan:
    """Plan everything, and cut the tiles of the first files that ``rank`` writes."""
    catalog = synthetic(tensors, chunks)
    target = parse_mesh(mesh)
    placed = Placed(target, {name: (Shard(0), Shard(1)) for name in catalog.tensors})
    planned = Plan(catalog, FORMATS["dcp"].lay_out(catalog, Request("out", placed=placed)))
    mine = share_files(planned.layout, rank, world_size, target.size)
    for group in planned.groups(next(planned.batches(mine)), TILE):
        for _ in planned.jobs(group, TILE):
            pass
    return planned


if __name__ == "__main__":
    gc.disable()
    plan(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
