"""What values and config files say of the framework that a checkpoint comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.mesh import Shard
from ckptool.errors import Damaged, Problem
from ckptool.formats.base import Source, read_metadata

CONFIG = "config.json"

_TOLD = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv heads",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "vocab_size": "vocabulary",
}


def framework_info(objects: Mapping[str, ObjectEntry]) -> dict[str, str]:
    """Entries for ``Catalog.info``, from values that a framework always saves.

    Lightning 2 (``pytorch-lightning_version``, in ``meta.pt`` or a ``.ckpt``), torchtitan 0.3
    (``train_state``, and a ``dataloader`` state for each data-parallel rank).
    """
    for name in ("meta.pytorch-lightning_version", "pytorch-lightning_version"):
        if name in objects and isinstance(objects[name].value, str):
            return {"framework": "Lightning", "version": objects[name].value}
    if "train_state.step" in objects and any(n.startswith("dataloader.dp_rank_") for n in objects):
        degree = objects.get("dataloader.world_size")
        known = degree is not None and type(degree.value) is int
        parallelism = {"parallelism": f"DP {degree.value}"} if degree and known else {}
        return {"framework": "torchtitan"} | parallelism
    return {}


def with_tensor_parallelism(catalog: Catalog) -> Catalog:
    """torchtitan's catalog with the degree of tensor parallelism, where its chunks tell.

    FSDP cuts torchtitan's dense tensors along dim 0; what the innermost mesh dim cuts along
    another dim, the others cutting the rest among all data-parallel ranks, is tensor-parallel.
    """
    mesh, told = catalog.mesh, catalog.info.get("parallelism", "")
    if catalog.info.get("framework") != "torchtitan" or mesh is None or len(mesh.shape) < 2:
        return catalog
    *data, tensor = mesh.shape
    if told != f"DP {math.prod(data)}" or not any(
        map(_is_cut_in_two_ways, catalog.tensors.values())
    ):
        return catalog
    return replace(catalog, info=catalog.info | {"parallelism": f"{told}, TP {tensor}"})


def _is_cut_in_two_ways(entry: TensorEntry) -> bool:
    """Whether a dense tensor is cut along dim 0, and by the last mesh dim along another."""
    placements = entry.placements or ()
    dims = [placement.dim if isinstance(placement, Shard) else None for placement in placements]
    return "experts" not in entry.name and bool(dims) and bool(dims[-1]) and 0 in dims[:-1]


def read_config(source: Source) -> Mapping[str, Any]:
    """A Hugging Face ``config.json`` in the folder, empty without one; a language model's inside.

    Raises Damaged where it is no JSON object.
    """
    content = read_json_object(source, CONFIG)
    inner = content.get("text_config")
    return {**content, **inner} if isinstance(inner, dict) else content


def read_json_object(source: Source, file: str) -> dict[str, Any]:
    """A small file's JSON object, empty without the file; Damaged where it is something else."""
    if file not in source.files:
        return {}
    try:
        content = json.loads(read_metadata(source, file))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Damaged(Problem(f"{file}: not a JSON object", "metadata-unreadable", file=file))
    return content


def config_info(source: Source) -> dict[str, str]:
    """Entries for ``Catalog.info`` from a Hugging Face config; none where it cannot be read."""
    try:
        config = read_config(source)
    except Damaged:
        return {}
    info = {}
    version = config.get("transformers_version")
    if isinstance(version, str):
        info = {"framework": "transformers", "version": version}
    names = config.get("architectures")
    told = [str(names[0])] if isinstance(names, list) and names else []
    told += [f"{word} {config[key]}" for key, word in _TOLD.items() if type(config.get(key)) is int]
    return info | ({"arguments": ", ".join(told)} if told else {})


def size_in(content: Mapping[str, Any], key: str) -> int | None:
    """A size that a model's config says; None where it is silent."""
    value = content.get(key)
    return value if type(value) is int and value > 0 else None
