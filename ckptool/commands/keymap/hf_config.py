"""A config.json for transformers, from what a checkpoint itself records of its model.

It is written only where everything that decides the model's values is recorded. Meta's params.json
says it for Llama 1 to 3 (not for the scaled rotary embeddings of 3.1 and later), Megatron-LM's
arguments (core 0.7 to 0.20) for models with RMSNorm, SwiGLU and plain rotary embeddings, where each
argument is understood or known to change nothing, and the tensors are exactly the architecture's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.commands.keymap.architectures import names_of
from ckptool.commands.keymap.config_check import main_dtype
from ckptool.commands.keymap.megatron_arguments import HARMLESS
from ckptool.commands.keymap.model_record import Record
from ckptool.core.catalog import Catalog
from ckptool.core.state_category import state_category

Config = dict[str, Any]

_META = {"dim", "n_layers", "n_heads", "norm_eps"}
_MEGATRON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "tie_word_embeddings": "tie_word_embeddings",
}
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "rotary_percent": (1.0,),
    "softmax_type": ("vanilla", None),
    "glu_linear_offset": (0.0, None),
    "hybrid_attention_ratio": (0.0, None),
    "hybrid_mlp_ratio": (0.0, None),
    "mtp_num_layers": (0, None),
}
_SHOWN_BY_NAMES = ("qk_layernorm", "add_qkv_bias")
_SIZES = ("num_query_groups", "group_query_attention", "untie_embeddings_and_output_weights")
_SIZES_OF_EXPERTS = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq")
_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_router_score_function": ("softmax",),
    "moe_router_pre_softmax": (False,),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_shared_expert_intermediate_size": (None,),
}


def recorded_config(found: Sequence[Record], catalog: Catalog) -> tuple[Config | None, str]:
    """The configuration of a model under Hugging Face's names, or None and what it lacks."""
    for record in found:
        if record.keys() >= _META:
            return _of_meta(record, catalog)
        if "num_layers" in record and "ffn_hidden_size" in record:
            return _of_megatron(record, catalog)
    return None, "the checkpoint does not record the model's configuration"


def with_dtype(config: Config, catalog: Catalog) -> Config:
    """With the element type of most of the weights' elements."""
    main = main_dtype(catalog)
    return config if main is None else {**config, "torch_dtype": main}


def _of_meta(record: Record, catalog: Catalog) -> tuple[Config | None, str]:
    if record.get("use_scaled_rope"):
        return None, "params.json does not record how the rotary embeddings are scaled"
    config = {
        "num_hidden_layers": record["n_layers"],
        "hidden_size": record["dim"],
        "num_attention_heads": record["n_heads"],
        "num_key_value_heads": record.get("n_kv_heads") or record["n_heads"],
        "rms_norm_eps": record["norm_eps"],
        "rope_theta": record.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
    }
    return _finished("llama", "LlamaForCausalLM", config, catalog)


def _of_megatron(record: Record, catalog: Catalog) -> tuple[Config | None, str]:
    odd = [*_unfit(record), *_not_understood(record)]
    odd += [f"{name} is not recorded" for name in _MEGATRON if record.get(name) is None]
    if odd:
        return None, "Megatron arguments: " + ", ".join(odd[:4])
    config = {theirs: record[name] for name, theirs in _MEGATRON.items()}
    groups = record.get("num_query_groups") or record["num_attention_heads"]
    config["num_key_value_heads"] = groups
    kind, architecture, more = _kind(record, catalog)
    return _finished(kind, architecture, config | more, catalog)


def _unfit(record: Record) -> list[str]:
    """The arguments that say what none of the models here computes."""
    wanted = {**_MUST_BE, **(_OF_EXPERTS if record.get("num_experts") else {})}
    return [
        f"{name} is {record.get(name)!r}"
        for name, values in wanted.items()
        if record.get(name) not in values
    ]


def _not_understood(record: Record) -> list[str]:
    """The arguments that say something, and nothing here knows what it does to the model."""
    known = {*_MEGATRON, *_MUST_BE, *_SHOWN_BY_NAMES, *_SIZES, *_SIZES_OF_EXPERTS, *_OF_EXPERTS}
    known |= HARMLESS
    has_experts = bool(record.get("num_experts"))
    return [
        f"{name} is {value!r}, which is not supported"
        for name, value in record.items()
        if name not in known and not _is_off(value) and (has_experts or not name.startswith("moe_"))
    ]


def _is_off(value: Any) -> bool:
    """Whether an argument says nothing; a zero may say something."""
    return value is None or value is False or (isinstance(value, str | list | tuple) and not value)


def _kind(record: Record, catalog: Catalog) -> tuple[str, str, Config]:
    """Which of transformers' models the names are those of, and what only that one has."""
    names = catalog.tensors
    if not record.get("num_experts"):
        if any(name.endswith(".q_norm.weight") for name in names):
            return "qwen3", "Qwen3ForCausalLM", {}
        if any(name.endswith(".q_proj.bias") for name in names):
            return "qwen2", "Qwen2ForCausalLM", {}
        return "llama", "LlamaForCausalLM", {}
    each, width = record["num_experts"], record.get("moe_ffn_hidden_size")
    shared = {"num_experts_per_tok": record.get("moe_router_topk", 2)}
    if any("block_sparse_moe" in name for name in names):
        mixtral = {
            "num_local_experts": each,
            "intermediate_size": width or record["ffn_hidden_size"],
        }
        return "mixtral", "MixtralForCausalLM", shared | mixtral
    qwen = {
        "num_experts": each,
        "moe_intermediate_size": width or record["ffn_hidden_size"],
        "norm_topk_prob": True,
        "mlp_only_layers": _dense_layers(record),
    }
    return "qwen3_moe", "Qwen3MoeForCausalLM", shared | qwen


def _dense_layers(record: Record) -> list[int]:
    """The layers without experts, by a list that says it of each, or where every nth has some."""
    said = record.get("moe_layer_freq") or 1
    layers = range(record["num_layers"])
    if isinstance(said, list):
        return [at for at, has in zip(layers, said, strict=False) if not has]
    return [at for at in layers if at % said]


def _finished(
    kind: str, architecture: str, config: Config, catalog: Catalog
) -> tuple[Config | None, str]:
    """With what the tensors themselves say; None where they are not exactly the architecture's."""
    found: Mapping[str, Any] = {name: e.shape for name, e in catalog.tensors.items()}
    embedding = found.get("model.embed_tokens.weight")
    gate = found.get("model.layers.0.mlp.gate_proj.weight")
    shapes = {"vocab_size": embedding[0]} if embedding else {}
    shapes |= {"intermediate_size": gate[0]} if gate else {}
    made = {"architectures": [architecture], "model_type": kind, **config, **shapes}
    wanted = names_of(made)
    model = {name for name, entry in catalog.tensors.items() if state_category(entry) == "model"}
    if model == wanted:
        return made, ""
    odd = sorted(model - wanted) or sorted(wanted - model)
    what = "has no" if model - wanted else "wants"
    return None, f"{architecture} {what} {', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''}"
