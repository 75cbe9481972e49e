"""The order of a model's parameters, from the records of ``torch_dist``: keys, chunks and plans.

Similar layers are stacked: ``decoder.layers.mlp.linear_fc1.weight`` is [layers, ...], its experts
``mlp.experts.experts.linear_fc1.weight`` [layers, experts, ...]. Different layers have numbers,
``decoder.layers.3.mlp.linear_fc1.weight``, and with ``singleton_local_shards`` (0.16) so have all,
and experts, ``mlp.experts.experts.5.linear_fc1.weight``; a gate and its up projection are separate
keys then, ``linear_fc1.weight_w`` and ``_v`` (megatron-core 0.7 to 0.20).

Each rank's plan lists what it saves in the order of its modules, a stacked key at the first layer
that it occurs in. Keys are those of Transformer Engine's modules, whose norms are part of the
linear layer after them. Megatron's own (local) layers have separate norms, before the attention's
other modules, named ``input_layernorm`` and ``pre_mlp_layernorm``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.catalog import TensorEntry
from ckptool.core.quantization.master_names import NORMS
from ckptool.core.views import join
from ckptool.errors import Undetermined
from ckptool.formats.dcp import SavePlan
from ckptool.formats.megatron.model import EMBEDDING, is_buffer

EXPERTS = "mlp.experts.experts."
_NESTED = "transformer_layer."
_QKV_NORM, _FC1_NORM = NORMS["input_layernorm."], NORMS["pre_mlp_layernorm."]
_PROJECTION = "self_attention.linear_proj.weight"
_EMBEDDINGS = (
    EMBEDDING,
    "embedding.position_embeddings.weight",
    "embedding.tokentype_embeddings.weight",
)
_NORMS = (
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "encoder.final_layernorm.weight",
    "encoder.final_layernorm.bias",
)
_HEADS = ("output_layer.weight", "output_layer.bias")


def _list_both(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}{last}" for module in modules for last in ("weight", "bias"))


_INPUT = (*_list_both("input_layernorm."), *_list_both(_QKV_NORM))
_OUT = _list_both("self_attention.linear_proj.")
_REST = _list_both(
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.layer_norm_",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_mlp_layernorm.",
    _FC1_NORM,
    "mlp.router.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.experts.experts.linear_fc1.",
    "mlp.experts.experts.linear_fc2.",
)
_SHARED = (
    "mlp.shared_experts.gate_weight",
    *_list_both("mlp.shared_experts.linear_fc1.", "mlp.shared_experts.linear_fc2."),
)
_LOCAL = (*_INPUT, *_OUT, *_REST, *_SHARED)
_FUSED = (*_INPUT[:2], *_OUT, *_INPUT[2:], *_REST, *_SHARED)
_BEFORE_NESTED, _AFTER_NESTED = (
    _list_both("enorm.", "hnorm.", "eh_proj."),
    _list_both("final_layernorm."),
)


def is_stacked_expert(inner: str) -> bool:
    """Return whether a layer's key is one of experts."""
    return inner.removeprefix(_NESTED).startswith(EXPERTS)


def order_outer(keys: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the keys of the embeddings before the layers, of the norms after, and of the heads.

    Layers that predict further tokens (``mtp``) are between the norms and the heads. Raises
    Undetermined for an unknown key.
    """
    names, tables = set(keys), (_EMBEDDINGS, _NORMS, _HEADS)
    unknown = names.difference(*tables)
    if unknown:
        raise Undetermined(f"the place of {min(unknown)} among the model's parameters is not known")
    embeddings, norms, heads = ([key for key in table if key in names] for table in tables)
    return embeddings, norms, heads


def order_layer(
    inner: Sequence[str], plans: Sequence[SavePlan], implementation: str | None
) -> list[str]:
    """Return the order of a layer's keys, by the plans, else by Megatron's own order.

    A layer that predicts further tokens has a whole one, ``transformer_layer``, among its own
    modules. Raises Undetermined if neither determines it.
    """
    if any(key.startswith(_NESTED) for key in inner):
        return _order_prediction(inner, plans, implementation)
    precedences = _find_precedences(set(inner), plans)
    local = _is_local(precedences, implementation)
    table = _LOCAL if local else _FUSED
    place = {key: position for position, key in enumerate(table)}
    if not set(inner) <= place.keys():
        return _sort_by_plans(precedences)
    by_table = sorted(inner, key=lambda key: place[key])
    broken = [(a, b) for b, earlier in precedences.items() for a in earlier if place[a] > place[b]]
    return _sort_by_plans(precedences) if broken else by_table


def _order_prediction(
    inner: Sequence[str], plans: Sequence[SavePlan], implementation: str | None
) -> list[str]:
    """Order ``MultiTokenPredictionLayer``: norms, projection, transformer layer, last norm."""
    nested = [key.removeprefix(_NESTED) for key in inner if key.startswith(_NESTED)]
    layer_keys = [f"{_NESTED}{key}" for key in order_layer(nested, plans, implementation)]
    order = [k for k in (*_BEFORE_NESTED, *layer_keys, *_AFTER_NESTED) if k in inner]
    if len(order) != len(inner):
        raise Undetermined(
            f"the place of {min(set(inner).difference(order))} in a layer is not known"
        )
    return order


def _find_precedences(inner: set[str], plans: Sequence[SavePlan]) -> dict[str, set[str]]:
    """Return for each key those before it in the layer in which a plan lists both first."""
    precedences: dict[str, set[str]] = {key: set() for key in inner}
    for plan in plans:
        met: dict[tuple[str, int], list[str]] = {}
        names: set[str] = set()
        for name, offset in plan:
            key = parse_layer_key(name, offset)
            if key is None or key.inner not in inner or name in names:
                continue
            names.add(name)
            earlier = met.setdefault((key.prefix, key.number), [])
            if key.inner not in earlier:
                precedences[key.inner].update(earlier)
                earlier.append(key.inner)
    return precedences


def _is_local(precedences: Mapping[str, set[str]], implementation: str | None) -> bool:
    norm = next((key for key in precedences if key.startswith(_QKV_NORM)), None)
    if norm and _PROJECTION in precedences:
        if norm in precedences[_PROJECTION]:
            return True
        if _PROJECTION in precedences[norm]:
            return False
    if implementation is None:
        raise Undetermined(
            "the files do not record whether its norms are fused with the layers after them"
        )
    return implementation == "local"


def _sort_by_plans(precedences: Mapping[str, set[str]]) -> list[str]:
    """Return the one order that the plans allow."""
    sorter = TopologicalSorter(precedences)
    order: list[str] = []
    try:
        sorter.prepare()
    except CycleError:
        raise Undetermined(
            "its ranks' plans disagree on the order of a layer's parameters"
        ) from None
    while sorter.is_active():
        ready = sorter.get_ready()
        if len(ready) > 1:
            raise Undetermined(
                f"the files do not say which of {' and '.join(sorted(ready)[:2])} comes first"
            )
        order += ready
        sorter.done(*ready)
    return order


def name_module(prefix: str, layer: int, inner: str, *, local: bool) -> str:
    """Return a layer parameter's name in the model: local layers have norms as modules."""
    module = inner.removeprefix(_NESTED)
    wrapper = inner[: len(inner) - len(module)]
    for norm, key in NORMS.items() if local else ():
        module = norm + module.removeprefix(key) if module.startswith(key) else module
    return f"{prefix}{layer}.{wrapper}{module}"


def is_local(order: Sequence[str]) -> bool:
    """Return whether a layer's order is that of Megatron's own layers."""
    keys = [key.removeprefix(_NESTED) for key in order]
    norms = [at for at, key in enumerate(keys) if key.startswith(_QKV_NORM)]
    return bool(norms) and _PROJECTION in keys and norms[0] < keys.index(_PROJECTION)


_STACKED = re.compile(r"(.*\blayers\.)(?![0-9])(.+)")
_NUMBERED = re.compile(r"(.*?\blayers\.)([0-9]{1,7})\.(.+)")
_NUMBERED_EXPERT = re.compile(r"(.*\bmlp\.experts\.experts\.)([0-9]{1,7})\.(.+)")
_HALF = re.compile(r"(.*\blinear_fc1\.(?:weight|bias))_[wv]")


class LayerKey(Struct, frozen=True):
    """The place of a key: ``{prefix}{number}.{inner}``, the expert, and dims that count layers."""

    prefix: str
    number: int
    inner: str
    expert: int | None
    stacked: int


class Layer(Struct):
    """One layer; ``keys`` are its keys in the checkpoint, by their inner name and expert."""

    prefix: str
    number: int
    stacked: int
    keys: dict[str, dict[int | None, str]] = field(default_factory=dict)


def parse_layer_key(key: str, offset: tuple[int, ...] | None) -> LayerKey | None:
    """Return the place of a key, for the chunk at ``offset``; None outside of all layers."""
    numbered = _NUMBERED.fullmatch(key)
    if numbered:
        return LayerKey(numbered[1], int(numbered[2]), *_split_expert(numbered[3]), 0)
    stacked = _STACKED.fullmatch(key)
    if stacked is None or not offset:
        return None
    return LayerKey(stacked[1], offset[0], *_split_expert(stacked[2]), 1)


def _split_expert(name: str) -> tuple[str, int | None]:
    half = _HALF.fullmatch(name)
    name = half[1] if half else name
    expert = _NUMBERED_EXPERT.fullmatch(name)
    return (f"{expert[1]}{expert[3]}", int(expert[2])) if expert else (name, None)


def join_gates(model: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Join a gate and its up projection if they are two tensors: [gate; up]."""
    joined: dict[str, TensorEntry] = {}
    for name, entry in model.items():
        half = _HALF.fullmatch(name)
        other = model.get(f"{half[1]}_v") if half else None
        if half is None or other is None or other.shape != entry.shape:
            joined[name] = entry
        elif name.endswith("_w"):
            joined[half[1]] = replace(join([entry, other], 0), name=half[1])
    return joined


def group_layers(
    entries: Iterable[TensorEntry], ranks: set[int]
) -> tuple[list[str], dict[tuple[str, int], Layer]]:
    """Return the keys outside of layers, and the layers of which one of ``ranks`` wrote a chunk.

    A chunk without a known writer counts as the first rank's. Layers are in order of their numbers.
    """
    outer_keys: dict[str, None] = {}
    layers: dict[tuple[str, int], Layer] = {}
    for entry in entries:
        for chunk in entry.chunks:
            if (chunk.rank or 0) not in ranks or is_buffer(entry.name):
                continue
            key = parse_layer_key(entry.name, chunk.box.lo)
            if key is None:
                outer_keys[entry.name] = None
                continue
            new = Layer(key.prefix, key.number, key.stacked)
            layer = layers.setdefault((key.prefix, key.number), new)
            layer.keys.setdefault(key.inner, {})[key.expert] = entry.name
    return list(outer_keys), dict(sorted(layers.items()))
