"""The names that transformers' architectures give their parameters in files (transformers 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LAYER = ("input_layernorm.weight", "post_attention_layernorm.weight")
_ATTENTION = tuple(f"self_attn.{one}_proj.weight" for one in "qkvo")
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_BIASES = tuple(f"self_attn.{one}_proj.bias" for one in "qkv")
_DENSE = tuple(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down"))
_MORE = {"qwen2": _BIASES, "qwen3": _NORMS, "qwen3_moe": _NORMS}


def names_of(config: Mapping[str, Any]) -> set[str]:
    """Every name of a llama, qwen2, qwen3, mixtral or qwen3_moe of this configuration."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names.add("lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{name}" for name in _of_layer(config, layer)}
    return names


def _of_layer(config: Mapping[str, Any], layer: int) -> Iterator[str]:
    kind = config["model_type"]
    yield from (*_LAYER, *_ATTENTION, *_MORE.get(kind, ()))
    if kind == "mixtral":
        yield "block_sparse_moe.gate.weight"
        for expert in range(config["num_local_experts"]):
            yield from (f"block_sparse_moe.experts.{expert}.w{n}.weight" for n in (1, 2, 3))
    elif kind == "qwen3_moe" and layer not in config["mlp_only_layers"]:
        yield "mlp.gate.weight"
        for expert in range(config["num_experts"]):
            yield from (name.replace("mlp.", f"mlp.experts.{expert}.") for name in _DENSE)
    else:
        yield from _DENSE
