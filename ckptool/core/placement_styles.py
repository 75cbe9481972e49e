"""What words and names say of placements: styles of a parameter, policies, names of mesh dims."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from ckptool.core.catalog import TensorEntry
from ckptool.core.mesh import Mesh, Placement, Placements, Replicate, Shard, StridedShard

REPLICATED = ("dp_replicate", "replicate", "pp")
SHARDED = ("fsdp", "dp_shard", "dp", "shard", "cp", "dp_cp", "dp_shard_cp")


def colwise(entry: TensorEntry) -> Placement:
    """Output features are sharded: the first dim of weight and bias."""
    return Shard(0) if entry.shape else Replicate()


def rowwise(entry: TensorEntry) -> Placement:
    """Input features are sharded: the second dim of a weight; a bias is replicated."""
    return Shard(1) if len(entry.shape) > 1 else Replicate()


def _replicated(entry: TensorEntry) -> Placement:
    return Replicate()


STYLES: dict[str, Callable[[TensorEntry], Placement]] = {
    "colwise": colwise,
    "rowwise": rowwise,
    "colwise_rep": colwise,
    "colwise_gather_output": colwise,
    "rowwise_rep": rowwise,
    "rowwise_split_input": rowwise,
    "local_colwise": colwise,
    "local_rowwise": rowwise,
    "sequence_parallel": _replicated,
    "replicated_with_grad_allreduce": _replicated,
    "replicate": _replicated,
}
"""The words of transformers' ``tp_plan`` (transformers 5) that say how a parameter is sharded."""

_COLWISE = re.compile(
    r"(.*\.)?(wq|wk|wv|w1|w3|q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)"
)
_ROWWISE = re.compile(r"(.*\.)?(wo|w2|o_proj|down_proj)\.(weight|bias)")
_VOCABULARY = re.compile(r"(.*\.)?(tok_embeddings|embed_tokens|output|lm_head|wte)\.weight")


def conventional_style(name: str) -> str:
    """How tensor parallelism shards a parameter of a Llama-like model, by its usual name."""
    stem = re.sub(r"\.(exp_avg|exp_avg_sq|max_exp_avg_sq)$", "", name)
    if _COLWISE.fullmatch(stem) or _VOCABULARY.fullmatch(stem):
        return "colwise"
    return "rowwise" if _ROWWISE.fullmatch(stem) else "replicate"


# Policies


def fsdp(entry: TensorEntry, mesh: Mesh) -> Placements:
    """Rows over all mesh dims, nested from left to right."""
    return (Shard(0) if entry.shape else Replicate(),) * len(mesh.shape)


def hsdp(entry: TensorEntry, mesh: Mesh) -> Placements:
    """A replica a step of the first mesh dim, rows over the others."""
    return (Replicate(), *fsdp(entry, mesh)[1:])


def replicate(entry: TensorEntry, mesh: Mesh) -> Placements:
    """The whole tensor on every rank."""
    return (Replicate(),) * len(mesh.shape)


POLICIES: dict[str, Callable[[TensorEntry, Mesh], Placements]] = {
    "fsdp": fsdp,
    "hsdp": hsdp,
    "replicate": replicate,
}


# Names of mesh dims


def fsdp_last(placements: Placements, mesh: Mesh, first: set[int]) -> Placements:
    """FSDP cuts what the mesh dims ``first`` (tensor or expert parallel) left of a tensor dim.

    So its shards of the same dim, written before theirs, become strided.
    """
    adjusted = list(placements)
    for at, placement in enumerate(placements):
        factor = math.prod(mesh.shape[f] for f in first if f > at and placements[f] == placement)
        if at not in first and isinstance(placement, Shard) and factor > 1:
            adjusted[at] = StridedShard(placement.dim, factor)
    return tuple(adjusted)


def is_conventional(mesh: Mesh) -> bool:
    """Whether all of the mesh's dims have names that say what they do."""
    known = (*REPLICATED, *SHARDED, "tp", "ep")
    return mesh.names is not None and all(name in known for name in mesh.names)


def by_dim_name(name: str, entry: TensorEntry) -> Placement:
    """What a conventional mesh dim (torchtitan 0.3) does to a parameter."""
    if name in REPLICATED or not entry.shape:
        return Replicate()
    if name == "ep":
        return Shard(0) if ".experts." in entry.name and len(entry.shape) > 2 else Replicate()
    return Shard(0) if name in SHARDED else Replicate()
