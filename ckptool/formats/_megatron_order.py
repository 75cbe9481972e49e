"""The order of a model's parameters, from what ``torch_dist`` records: keys, chunks and plans.

The keys of layers are stacked: ``decoder.layers.mlp.linear_fc1.weight`` is [layers, ...], experts'
are [layers, experts, ...]. Each rank's plan lists what it saves in the order of its modules, a key
at the first layer that it occurs in. Keys are those of Transformer Engine's modules, whose norms
are part of the linear layer after them; Megatron's own (local) layers have separate norms, which
come before the attention's other modules and are called ``input_layernorm`` and
``pre_mlp_layernorm``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from ckptool.formats._dcp_metadata import Plan
from ckptool.formats._megatron_state import Unnamed

_STACKED = re.compile(r"(.*\blayers\.)(?![0-9])(.+)")
_EXPERTS = "mlp.experts.experts."
_QKV_NORM, _FC1_NORM = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
_PROJECTION = "self_attention.linear_proj.weight"
_BEFORE = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "embedding.tokentype_embeddings.weight",
)
_AFTER = (
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "encoder.final_layernorm.weight",
    "encoder.final_layernorm.bias",
    "output_layer.weight",
    "output_layer.bias",
)
_LOCAL = (
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.layer_norm_bias",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_bias",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc1.bias",
    "mlp.experts.experts.linear_fc2.weight",
    "mlp.experts.experts.linear_fc2.bias",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc1.bias",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_experts.linear_fc2.bias",
)
_FUSED = (
    *_LOCAL[2:4],
    *_LOCAL[0:2],
    *_LOCAL[4:8],
    "pre_mlp_layernorm.weight",
    "pre_mlp_layernorm.bias",
    *_LOCAL[8:],
)


def stacked(key: str) -> tuple[str, str] | None:
    """What precedes and follows the layer's number, of a key that stacks layers; else None."""
    match = _STACKED.fullmatch(key)
    return (match[1], match[2]) if match else None


def is_stacked_expert(inner: str) -> bool:
    """Whether a stacked key stacks experts as well."""
    return inner.startswith(_EXPERTS)


def outer_order(keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """The keys before the layers, and those after them; Unnamed for an unknown one."""
    unknown = [key for key in keys if key not in _BEFORE and key not in _AFTER]
    if unknown:
        raise Unnamed(
            f"the place of {sorted(unknown)[0]} among the model's parameters is not known"
        )
    return [k for k in _BEFORE if k in set(keys)], [k for k in _AFTER if k in set(keys)]


def layer_order(
    inner: Sequence[str], plans: Sequence[Plan], implementation: str | None
) -> list[str]:
    """The order of a layer's keys, from the plans, and Megatron's own where they leave it open.

    Raises Unnamed where neither knows.
    """
    before = _precedences(set(inner), plans)
    local = _is_local(before, implementation)
    table = _LOCAL if local else _FUSED
    place = {key: position for position, key in enumerate(table)}
    if not set(inner) <= place.keys():
        return _only_order(inner, before)
    by_table = sorted(inner, key=lambda key: place[key])
    broken = [(a, b) for b, earlier in before.items() for a in earlier if place[a] > place[b]]
    return _only_order(inner, before) if broken else by_table


def _precedences(inner: set[str], plans: Sequence[Plan]) -> dict[str, set[str]]:
    """For each key, those that come before it in the layer in which a plan meets both first."""
    before: dict[str, set[str]] = {key: set() for key in inner}
    for plan in plans:
        first: dict[str, int] = {}
        for name, offset in plan:
            found = stacked(name)
            if found and found[1] in inner and offset and found[1] not in first:
                for other, layer in first.items():
                    if layer == offset[0]:
                        before[found[1]].add(other)
                first[found[1]] = offset[0]
    return before


def _is_local(before: Mapping[str, set[str]], implementation: str | None) -> bool:
    norm = next((key for key in before if key.startswith(_QKV_NORM)), None)
    if norm and _PROJECTION in before:
        if norm in before[_PROJECTION]:
            return True
        if _PROJECTION in before[norm]:
            return False
    if implementation is None:
        raise Unnamed("nothing says whether its norms are fused with the layers after them")
    return implementation == "local"


def _only_order(inner: Sequence[str], before: Mapping[str, set[str]]) -> list[str]:
    """The one order that the plans allow."""
    sorter = TopologicalSorter(before)
    order: list[str] = []
    try:
        sorter.prepare()
    except CycleError:
        raise Unnamed("its ranks' plans disagree on the order of a layer's parameters") from None
    while sorter.is_active():
        ready = sorter.get_ready()
        if len(ready) > 1:
            raise Unnamed(
                f"nothing says which of {' and '.join(sorted(ready)[:2])} comes first in a layer"
            )
        order += ready
        sorter.done(*ready)
    return order


def module_name(prefix: str, layer: int, inner: str, *, local: bool) -> str:
    """The name of a layer's parameter in the model: a local layer's norms are its own modules."""
    if local and inner.startswith(_QKV_NORM):
        inner = f"input_layernorm.{inner.removeprefix(_QKV_NORM)}"
    elif local and inner.startswith(_FC1_NORM):
        inner = f"pre_mlp_layernorm.{inner.removeprefix(_FC1_NORM)}"
    return f"{prefix}{layer}.{inner}"


def is_local(order: Sequence[str]) -> bool:
    """Whether a layer's order is that of Megatron's own layers."""
    norms = [at for at, key in enumerate(order) if key.startswith(_QKV_NORM)]
    return bool(norms) and _PROJECTION in order and norms[0] < order.index(_PROJECTION)
