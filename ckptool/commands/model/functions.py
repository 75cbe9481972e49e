"""What a transformers model computes that its tensors' names and shapes do not show.

Models share Llama's names and differ in scalars, in the order of their parts, or in which layers
rotate: a map of names turns them into a checkpoint that loads but computes something else. Keys and
types are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ckptool.commands.model.records import Record
from ckptool.core.keymap.model import Pattern, Rule

_SCALARS = {
    "embedding_multiplier": 1,  # Granite
    "attention_multiplier": None,  # Granite: in the place of 1 / sqrt(head size)
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,  # Cohere
    "attn_logit_softcapping": None,  # Gemma 2
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "scale_emb": 1,  # MiniCPM
    "scale_depth": None,
    "dim_model_base": None,
    "partial_rotary_factor": 1,
    "use_parallel_residual": False,
    "parallel_attn": False,
    "attention_chunk_size": None,
}
"""Keys of config.json, and the value at which each has no effect."""
_ACTIVATIONS = ("silu", "swish")
_TYPES = {
    "cohere": "attention and MLP are in parallel, norms subtract the mean",
    "cohere2": "attention and MLP are in parallel, norms subtract the mean",
    "gemma": "norms multiply by weight + 1, embeddings are scaled",
    "helium": "rotary pairs are neighbors",
    "ernie4_5": "rotary pairs are neighbors",
    "glm": "rotary pairs are neighbors",
    "glm4": "rotary pairs are neighbors",
    "olmo": "norms have no weight and subtract the mean",
    "olmo2": "norms follow attention and MLP",
    "olmo3": "norms follow attention and MLP",
}
"""Model types whose difference from Llama is not in their config.json."""

_FUSED = {
    "phi3": (".self_attn.qkv_proj.weight", ".mlp.gate_up_proj.weight"),
    "glm": (".mlp.gate_up_proj.weight",),
    "glm4": (".mlp.gate_up_proj.weight",),
}
"""By model type, its fused blocks of rows: all queries, all keys, all values; gate, up."""


def fused_otherwise(rules: Iterable[Rule], types: Collection[str]) -> str:
    """Return the tensor that rules read by groups of rows, but that has blocks; "" if none.

    By group, as in Megatron-core, all shapes would be right and all heads wrong.
    """
    ends = tuple(end for kind in types for end in _FUSED.get(kind, ()))
    patterns = (p for rule in rules for p in (*rule.sources, *rule.targets))
    fused = (p for p in patterns if p.text.partition(" ")[0].endswith(ends or ("\n",)))
    return next((pattern.text for pattern in fused if _is_grouped(pattern)), "")


def _is_grouped(pattern: Pattern) -> bool:
    """Return whether blocks, or terms of a sum, are inside other axes of a tensor's first dim."""
    if pattern.block is not None:
        return bool(pattern.block.outer)
    return any(len(axis) > 1 for dim in (pattern.axes or ())[:1] for axis in dim[1:])


def differing_function(recorded: Record, types: Collection[str]) -> str:
    """Return how a model's computation differs from Llama-like models of its names; "" if unknown.

    ``types`` are the model types that its config.json names.
    """
    return ", ".join(_differences(recorded, types))


def _differences(recorded: Record, types: Collection[str]) -> Iterator[str]:
    yield from (_TYPES[kind] for kind in types if kind in _TYPES)
    for key, neutral in _SCALARS.items():
        value = recorded.get(key)
        if value is not None and value != neutral:
            yield f"{key} is {value}"
    rotated = recorded.get("no_rope_layers")
    if isinstance(rotated, list) and 0 in rotated:
        layers = [str(layer) for layer, rotates in enumerate(rotated) if rotates == 0]
        yield f"layers {', '.join(layers)} have no rotary embeddings (no_rope_layers)"
    activation = recorded.get("hidden_act", recorded.get("hidden_activation"))
    if isinstance(activation, str) and activation not in _ACTIVATIONS:
        yield f"the activation is {activation}"
