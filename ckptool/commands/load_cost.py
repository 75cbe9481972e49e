"""What loading costs each rank of a mesh: files opened and bytes read by torch's own loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptool.core.catalog import TensorEntry
from ckptool.core.placing import Placed
from ckptool.core.plan import ChunkIndex


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Files that a rank opens, and bytes of tensor data that it reads."""

    files: int
    nbytes: int


def load_costs(entries: Iterable[TensorEntry], placed: Placed) -> tuple[LoadCost, ...]:
    """The cost for each row-major position of the mesh, when every chunk touched is read whole.

    ``torch.distributed.checkpoint.load`` (torch 2.13) reads whole items, however little of one a
    rank needs.
    """
    files: list[set[str]] = [set() for _ in range(placed.mesh.size)]
    nbytes = [0] * placed.mesh.size
    for entry in entries:
        index = ChunkIndex(entry)
        for position, shard in enumerate(placed.shards(entry)):
            touched = {
                id(chunk): chunk for piece in shard.pieces for chunk, _ in index.find(piece.box)
            }
            for chunk in touched.values():
                files[position].add(chunk.at.file)
                nbytes[position] += chunk.box.volume * entry.source_dtype.itemsize
    return tuple(LoadCost(len(opened), held) for opened, held in zip(files, nbytes, strict=True))
