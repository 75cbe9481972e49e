"""The tensors of a model by its config.json alone: names and shapes, without transformers.

Of architectures that key maps know too, as transformers 5 names the tensors in files: with separate
experts. A shape is a product of sizes for each dim; a size is a key of the config, or worked out of
several. Whatever else may change the tensors (another class, a quantization, a size that the config
does not state) makes the answer None: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from ckptool.commands.model.records import Record

Shapes = dict[str, tuple[int, ...]]

HEAD = "lm_head.weight"
_NORMS = ("input_layernorm.weight [hidden]", "post_attention_layernorm.weight [hidden]")
_FOUR_NORMS = (
    *_NORMS,
    "pre_feedforward_layernorm.weight [hidden]",
    "post_feedforward_layernorm.weight [hidden]",
)
_NORMS_AFTER = (
    "post_attention_layernorm.weight [hidden]",
    "post_feedforward_layernorm.weight [hidden]",
)
_ATTENTION = (
    "self_attn.q_proj.weight [q,hidden]",
    "self_attn.k_proj.weight [kv,hidden]",
    "self_attn.v_proj.weight [kv,hidden]",
    "self_attn.o_proj.weight [hidden,q]",
)
_BIASES = ("self_attn.q_proj.bias [q]", "self_attn.k_proj.bias [kv]", "self_attn.v_proj.bias [kv]")
_OUTPUT_BIAS = ("self_attn.o_proj.bias [hidden]",)
_NORMED_HEADS = ("self_attn.q_norm.weight [head]", "self_attn.k_norm.weight [head]")
_NORMED = ("self_attn.q_norm.weight [q]", "self_attn.k_norm.weight [kv]")
_DENSE = (
    "mlp.gate_proj.weight [ffn,hidden]",
    "mlp.up_proj.weight [ffn,hidden]",
    "mlp.down_proj.weight [hidden,ffn]",
)
_DENSE_BIASES = (
    "mlp.gate_proj.bias [ffn]",
    "mlp.up_proj.bias [ffn]",
    "mlp.down_proj.bias [hidden]",
)
_FUSED = (
    "self_attn.qkv_proj.weight [q+kv+kv,hidden]",
    "self_attn.o_proj.weight [hidden,q]",
    "mlp.gate_up_proj.weight [ffn+ffn,hidden]",
    "mlp.down_proj.weight [hidden,ffn]",
)
_ROUTER = ("mlp.gate.weight [experts,hidden]",)
_EXPERT = (
    "mlp.experts.{expert}.gate_proj.weight [expert_ffn,hidden]",
    "mlp.experts.{expert}.up_proj.weight [expert_ffn,hidden]",
    "mlp.experts.{expert}.down_proj.weight [hidden,expert_ffn]",
)
_SHARED = (
    "mlp.shared_expert.gate_proj.weight [shared_ffn,hidden]",
    "mlp.shared_expert.up_proj.weight [shared_ffn,hidden]",
    "mlp.shared_expert.down_proj.weight [hidden,shared_ffn]",
    "mlp.shared_expert_gate.weight [one,hidden]",
)
_MIXTRAL = (
    "block_sparse_moe.gate.weight [experts,hidden]",
    "block_sparse_moe.experts.{expert}.w1.weight [expert_ffn,hidden]",
    "block_sparse_moe.experts.{expert}.w2.weight [hidden,expert_ffn]",
    "block_sparse_moe.experts.{expert}.w3.weight [expert_ffn,hidden]",
)


class _Architecture(Struct, frozen=True):
    """The class of a model, and the tensors of its layers: of all, of dense ones, of experts'.

    ``more`` are tensors that a flag of the config adds. ``ties`` is whether the head is tied if the
    config does not say; ``heads``, whether a head then has its share of the hidden size.
    """

    name: str
    layer: tuple[str, ...]
    dense: tuple[str, ...] = _DENSE
    experts: tuple[str, ...] = ()
    more: Mapping[str, tuple[str, ...]] = {}
    ties: bool = False
    heads: bool = True


_BIASED = {"attention_bias": (*_BIASES, *_OUTPUT_BIAS)}
_LLAMA = {**_BIASED, "mlp_bias": _DENSE_BIASES}
_ON = frozenset(["qkv_bias"])
"""Flags that a config without them has on."""

_ARCHITECTURES = {
    "llama": _Architecture("Llama", (*_NORMS, *_ATTENTION), more=_LLAMA),
    "mistral": _Architecture("Mistral", (*_NORMS, *_ATTENTION)),
    "granite": _Architecture("Granite", (*_NORMS, *_ATTENTION), more=_LLAMA),
    "qwen2": _Architecture("Qwen2", (*_NORMS, *_ATTENTION, *_BIASES)),
    "qwen3": _Architecture(
        "Qwen3", (*_NORMS, *_ATTENTION, *_NORMED_HEADS), more=_BIASED, heads=False
    ),
    "gemma": _Architecture("Gemma", (*_NORMS, *_ATTENTION), more=_BIASED, ties=True, heads=False),
    "gemma2": _Architecture(
        "Gemma2", (*_FOUR_NORMS, *_ATTENTION), more=_BIASED, ties=True, heads=False
    ),
    "gemma3_text": _Architecture(
        "Gemma3", (*_FOUR_NORMS, *_ATTENTION, *_NORMED_HEADS), more=_BIASED, ties=True, heads=False
    ),
    "olmo2": _Architecture("Olmo2", (*_NORMS_AFTER, *_ATTENTION, *_NORMED), more=_BIASED),
    "phi3": _Architecture("Phi3", _NORMS, _FUSED),
    "mixtral": _Architecture("Mixtral", (*_NORMS, *_ATTENTION), (), _MIXTRAL),
    "olmoe": _Architecture(
        "Olmoe",
        (*_NORMS, *_ATTENTION, *_NORMED),
        (),
        (*_ROUTER, *_EXPERT),
        more=_BIASED,
    ),
    "qwen2_moe": _Architecture(
        "Qwen2Moe",
        (*_NORMS, *_ATTENTION),
        experts=(*_ROUTER, *_EXPERT, *_SHARED),
        more={"qkv_bias": _BIASES},
    ),
    "qwen3_moe": _Architecture(
        "Qwen3Moe",
        (*_NORMS, *_ATTENTION, *_NORMED_HEADS),
        experts=(*_ROUTER, *_EXPERT),
        more=_BIASED,
        heads=False,
    ),
}

_CAUSAL = "ForCausalLM"
_FIRST = ("model.embed_tokens.weight [vocab,hidden]", "model.norm.weight [hidden]")
_LAST = f"{HEAD} [vocab,hidden]"
_STATED = {
    "vocab": ("vocab_size",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "experts": ("num_experts", "num_local_experts"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared_ffn": ("shared_expert_intermediate_size",),
}
"""The keys of a config that state a size, the first that it has."""
MOST_LAYERS = 1 << 16
"""Layers of a model, times the experts of each; a config with more is odd."""


def class_of(config: Record) -> str | None:
    """Return the class of a config's model if its tensors are known here, else None."""
    kind = _ARCHITECTURES.get(str(config.get("model_type")))
    if kind is None or config.get("quantization_config") or config.get("auto_map"):
        return None
    name = f"{kind.name}{_CAUSAL}"
    return name if config.get("architectures") in (None, [name]) else None


def is_tied(config: Record) -> bool:
    """Return whether the head of a known model is its embedding, and need not be saved."""
    tied = config.get("tie_word_embeddings")
    kind = _ARCHITECTURES.get(str(config.get("model_type")))
    return (kind is not None and kind.ties) if tied is None else bool(tied)


def shapes_of(config: Record) -> Shapes | None:
    """Return the shape of every tensor of a config's model by name, its head included.

    None if the architecture is unknown, or its config lacks a size or has an odd one.
    """
    sizes = _sizes(config)
    if class_of(config) is None or sizes is None:
        return None
    kind = _ARCHITECTURES[str(config["model_type"])]
    shapes: Shapes = {}
    try:
        for text in _tensors(kind, config, sizes):
            name, _, dims = text.removesuffix("]").partition(" [")
            shapes[name] = tuple(_size(dim, sizes) for dim in dims.split(","))
    except KeyError:
        return None
    return shapes


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the size of a dim, such as ``q+kv``. Raises KeyError if it is not known."""
    return sum(sizes[part] for part in dim.split("+"))


def _sizes(config: Record) -> dict[str, int] | None:
    """Return what a config states, with the sizes of all heads together; None if it does not."""
    kind = _ARCHITECTURES.get(str(config.get("model_type")))
    layers: Any = config.get("num_hidden_layers")
    heads: Any = config.get("num_attention_heads")
    hidden: Any = config.get("hidden_size")
    head: Any = config.get("head_dim")
    if kind is None or not _are_counts(layers, heads, hidden):
        return None
    if head is None and kind.heads:
        head = hidden // heads
    groups: Any = config.get("num_key_value_heads", heads if kind.heads else None)
    if not _are_counts(head, groups):
        return None
    sizes = {"layers": layers, "head": head, "q": heads * head, "kv": groups * head, "one": 1}
    for size, keys in _STATED.items():
        count = next((config[key] for key in keys if config.get(key) is not None), None)
        if _are_counts(count):
            sizes[size] = count
    return sizes if layers * sizes.get("experts", 1) <= MOST_LAYERS else None


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _tensors(kind: _Architecture, config: Record, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the name and dims of each tensor. Raises KeyError if its experts are not known."""
    yield from (*_FIRST, _LAST)
    flags = [flag for flag in kind.more if config.get(flag, flag in _ON)]
    extras = [text for flag in flags for text in kind.more[flag]]
    sparse = _layers_with_experts(config, sizes["layers"]) if kind.experts else ()
    for layer in range(sizes["layers"]):
        parts = kind.experts if layer in sparse else kind.dense
        for text in (*kind.layer, *extras, *parts):
            numbers = range(sizes["experts"]) if "{expert}" in text else (0,)
            for expert in numbers:
                yield f"model.layers.{layer}.{text.replace('{expert}', str(expert))}"


def _layers_with_experts(config: Record, layers: int) -> set[int]:
    """Return the layers that have experts (Qwen2-MoE, Qwen3-MoE); KeyError if a config is odd."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    if type(step) is not int or not isinstance(dense, list):
        raise KeyError
    without = {layer for layer in dense if type(layer) is int}
    return {layer for layer in range(layers) if layer not in without and (layer + 1) % step == 0}
