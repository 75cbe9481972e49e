"""What a model of transformers computes that its tensors' names and shapes do not tell.

Models share the names of Llama and differ in scalars, in the order of their parts, or in which
layers rotate: a map of names makes of them a checkpoint that loads and computes something else.
Keys and types are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptool.commands.keymap.records import Record

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
"""Keys of config.json, and the value with which each changes nothing."""
_ACTIVATIONS = ("silu", "swish")
_TYPES = {
    "cohere": "attention and MLP are in parallel, norms subtract the mean",
    "cohere2": "attention and MLP are in parallel, norms subtract the mean",
    "gemma": "norms multiply by weight + 1, embeddings are scaled",
    "helium": "rotary pairs are neighbours",
    "ernie4_5": "rotary pairs are neighbours",
    "glm": "rotary pairs are neighbours",
    "glm4": "rotary pairs are neighbours",
    "olmo": "norms have no weight and subtract the mean",
    "olmo2": "norms follow attention and MLP",
    "olmo3": "norms follow attention and MLP",
}
"""Model types whose config.json does not say in what they differ from Llama."""


def differing_function(recorded: Record, types: Collection[str]) -> str:
    """Return in what a model computes other than Llama-like ones of its names; "" if nothing known.

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
