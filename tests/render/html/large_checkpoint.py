"""The catalog of a large model on a device mesh, as torchtitan 0.3 saves it; no file is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptool.commands.inspect.report import InspectReport, report
from ckptool.commands.open import OpenedCheckpoint
from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Catalog, Chunk, Extent, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Mesh, Placements, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import local_shards
from ckptool.formats import FORMATS
from ckptool.storage.local import LocalSource

WIDE, HIDDEN, WORDS = 4096, 14336, 128256
COLWISE: Placements = (StridedShard(0, 8), Shard(0))
ROWWISE: Placements = (Shard(0), Shard(1))
FLAT: Placements = (Shard(0), Replicate())
LAYER: dict[str, tuple[tuple[int, ...], Placements]] = {
    "attention.wq.weight": ((WIDE, WIDE), COLWISE),
    "attention.wk.weight": ((1024, WIDE), COLWISE),
    "attention.wv.weight": ((1024, WIDE), COLWISE),
    "attention.wo.weight": ((WIDE, WIDE), ROWWISE),
    "feed_forward.w1.weight": ((HIDDEN, WIDE), COLWISE),
    "feed_forward.w2.weight": ((WIDE, HIDDEN), ROWWISE),
    "feed_forward.w3.weight": ((HIDDEN, WIDE), COLWISE),
    "attention_norm.weight": ((WIDE,), FLAT),
    "ffn_norm.weight": ((WIDE,), FLAT),
}


def parameters(layers: int) -> Iterator[tuple[str, tuple[int, ...], Placements]]:
    """Yield name, shape and placements."""
    yield "tok_embeddings.weight", (WORDS, WIDE), COLWISE
    for layer in range(layers):
        for name, (shape, placements) in LAYER.items():
            yield f"layers.{layer}.{name}", shape, placements
    yield "norm.weight", (WIDE,), FLAT
    yield "output.weight", (WORDS, WIDE), COLWISE


def entry(
    name: str, shape: tuple[int, ...], dtype: str, mesh: Mesh, placements: Placements
) -> TensorEntry:
    """Return a tensor whose chunks the first rank that holds each wrote."""
    writers: dict[Box, int] = {}
    for rank, shard in enumerate(local_shards(shape, mesh.shape, placements)):
        for piece in shard.pieces:
            writers.setdefault(piece.box, rank)
    strides = row_major_strides(shape, BY_NAME[dtype].itemsize)
    chunks = tuple(Chunk(b, Extent(f"__{r}_0.distcp", 0, strides), r) for b, r in writers.items())
    return TensorEntry(name, tuple(name.split(".")), BY_NAME[dtype], shape, chunks, placements)


def large_report(layers: int = 37, mesh: Mesh | None = None) -> InspectReport:
    """Describe a model of so many layers with the state of AdamW: 1,002 tensors, 64 ranks."""
    mesh = mesh or Mesh.of((8, 8), ("dp", "tp"))
    tensors: dict[str, TensorEntry] = {}
    for name, shape, placements in parameters(layers):
        states = [f"model.{name}", *(f"optim.state.{name}.{s}" for s in ("exp_avg", "exp_avg_sq"))]
        for full, dtype in zip(states, ("bfloat16", "float32", "float32"), strict=True):
            tensors[full] = entry(full, shape, dtype, mesh, placements)
    values = {
        name: ObjectEntry(name, tuple(name.split(".")), value)
        for name, value in {
            "train_state.step": 12000,
            "train_state.tokens_seen": 50331648000,
            "optim.param_groups.lr": 0.0003,
            "optim.param_groups.betas": (0.9, 0.95),
            "dataloader.state": {"epoch": 1, "offsets": list(range(400))},
        }.items()
    }
    info = {"writer": "torch.distributed.checkpoint", "framework": "torchtitan"}
    info["parallelism"] = "TP 8, DP 8"
    files = {f"__{rank}_0.distcp": 1 << 30 for rank in range(mesh.size)}
    catalog = Catalog("dcp", tensors, values, files, mesh.size, mesh, "declared", info)
    root = Path("runs/llama3-8b/step-12000")
    return report(OpenedCheckpoint(root, LocalSource(root, {}), FORMATS["dcp"], catalog))
