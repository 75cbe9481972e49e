"""Which weight a master is of, by the names that trainers give to both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import is_master

_PREFIXES = ("", "model.", "module.")
"""What may come before the name of a parameter that its master has: those of Megatron's
torch_dist have nothing, DeepSpeed's ``module``."""
_IN_STATE = re.compile(
    r"(?s)(?:.+\.)?state\.(?:fp32_param|fp32_from_fp16|param)\.(?P<of_kind>.+)"
    r"|(?=.*\.master_param\Z)(?:.+\.)?state\.(?P<own>.+)\.master_param"
)
"""The name of a master in an optimizer's state: by kind (Megatron-core's torch_dist; NeMo 1.2x, of
Apex's DistributedFusedAdam), or by parameter (Megatron-FSDP, Transformer Engine's FusedAdam)."""
_LAYER = re.compile(r"(?<=\blayers)\.([0-9]{1,9})(?=\.)")
_EXPERT = re.compile(r"(?<=\bexperts\.)(?:local_)?(experts)\.([0-9]{1,9})(?=\.)")
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms of Megatron's own layers, and their keys in ``torch_dist``, which are those of Transformer
Engine's (megatron-core 0.12 to 0.20, ``gpt_layer_specs.py``)."""
_TYPES = ("float32", "float16", "bfloat16")


class Mastered(NamedTuple):
    """A weight, or the part ``at`` an index of a stacked one, and its master of the same shape."""

    weight: TensorEntry
    at: tuple[int, ...]
    master: TensorEntry


def mastered(
    masters: Mapping[str, TensorEntry], tensors: Mapping[str, TensorEntry], dtype: str
) -> Iterator[Mastered]:
    """Yield the weights that have masters of a type, under each of the names that they may have."""
    for name, master in masters.items():
        if master.dtype.name != dtype or not master.elements:
            continue
        parameter = parameter_of(name)
        for key, index in keys_of(parameter) if parameter else ():
            weight = tensors.get(key)
            if weight is not None and _is_weight(weight, index, master):
                yield Mastered(weight, index, master)


def parameter_of(name: str) -> str | None:
    """Return the name of the parameter that a name is the master of; None if it is no master's."""
    if is_master(name):
        return name.partition(".")[2]
    match = _IN_STATE.fullmatch(name) if "state." in name else None
    return match["of_kind"] or match["own"] if match else None


def keys_of(parameter: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names that the weight of a parameter may have, and its index in one of a stack."""
    for prefix in _PREFIXES:
        yield prefix + parameter, ()
    renamed = parameter
    for norm, key in NORMS.items():
        renamed = renamed.replace(norm, key)
    for name in {parameter: None, renamed: None}:
        matches = _LAYER.search(name), _EXPERT.search(name)
        for layer, expert in product(*({match: None, None: None} for match in matches)):
            key, index = name, tuple[int, ...]()
            if layer:
                key, index = _LAYER.sub("", key), (int(layer[1]),)
            if expert:
                key, index = _EXPERT.sub(r"\1", key), (*index, int(expert[2]))
            if key != parameter:
                yield key, index


def _is_weight(entry: TensorEntry, index: tuple[int, ...], master: TensorEntry) -> bool:
    is_inside = all(at < size for at, size in zip(index, entry.shape, strict=False))
    is_known = entry.stored is None and entry.dtype.name in _TYPES
    return is_known and is_inside and entry.shape[len(index) :] == master.shape
