"""A config.json for transformers, from what a checkpoint itself records of its model.

It is written only if everything that affects the model's values is recorded. Meta's params.json
suffices for Llama 1 to 3 (not for the scaled rotary embeddings of 3.1 and later), Megatron-LM's
arguments (core 0.7 to 0.20) for models with RMSNorm, SwiGLU and plain rotary embeddings, if each
argument is understood or known to have no effect, and the tensors are exactly the architecture's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from reprlib import repr as shortened
from typing import Any

from ckptool.commands.model.architectures import HEAD, MOST_LAYERS, class_of, shapes_of
from ckptool.commands.model.records import Record
from ckptool.core.catalog import Catalog
from ckptool.core.state_category import state_category
from ckptool.core.text import list_some

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


def recorded_config(records: Sequence[Record], catalog: Catalog) -> tuple[Config | None, str]:
    """Return the model's configuration under Hugging Face's names, or None and what is missing."""
    for record in records:
        if record.keys() >= _META:
            return _of_meta(record, catalog)
        if "num_layers" in record and "ffn_hidden_size" in record:
            return _of_megatron(record, catalog)
    return None, "the checkpoint does not record the model's configuration"


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
    return _check_names("llama", config, catalog)


def _of_megatron(record: Record, catalog: Catalog) -> tuple[Config | None, str]:
    problems = [*_unsupported_values(record), *_unknown_arguments(record)]
    problems += [f"{name} is not recorded" for name in _MEGATRON if record.get(name) is None]
    if problems:
        return None, "Megatron arguments: " + ", ".join(problems[:4])
    config = {key: record[name] for name, key in _MEGATRON.items()}
    groups = record.get("num_query_groups") or record["num_attention_heads"]
    config["num_key_value_heads"] = groups
    model_type, more = _model_type(record, catalog)
    return _check_names(model_type, config | more, catalog)


def _unsupported_values(record: Record) -> list[str]:
    """List the arguments whose value requests something that none of these models computes."""
    supported = {**_MUST_BE, **(_OF_EXPERTS if record.get("num_experts") else {})}
    names = [name for name, values in supported.items() if record.get(name) not in values]
    layers, frequency = record["num_layers"], record.get("moe_layer_freq")
    if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
        names.append("num_layers")
    if frequency is not None and type(frequency) not in (int, list):
        names.append("moe_layer_freq")
    return [f"{name} is {shortened(record.get(name))}" for name in names]


def _unknown_arguments(record: Record) -> list[str]:
    """List the arguments that are set and may change the model in an unknown way."""
    names = {*_MEGATRON, *_MUST_BE, *_SHOWN_BY_NAMES, *_SIZES, *_SIZES_OF_EXPERTS, *_OF_EXPERTS}
    names |= _harmless_arguments()
    has_experts = bool(record.get("num_experts"))
    return [
        f"{name} is {value!r}, which is not supported"
        for name, value in record.items()
        if name not in names and not _is_off(value) and (has_experts or not name.startswith("moe_"))
    ]


@cache
def _harmless_arguments() -> frozenset[str]:
    """Return Megatron-LM's arguments that do not affect what a trained model computes.

    From its command line and configuration classes (core 0.7 to 0.20): how, on what, where and how
    fast it was trained, in which precision, and details of what another argument switches on.
    """
    file = resources.files(__package__).joinpath("megatron_arguments.txt")
    return frozenset(file.read_text("utf-8").split())


def _is_off(value: Any) -> bool:
    """Return whether an argument is unset; a zero may be a setting."""
    return value is None or value is False or (isinstance(value, str | list | tuple) and not value)


def _model_type(record: Record, catalog: Catalog) -> tuple[str, Config]:
    """Return the type of transformers' model with these names, and the keys only it records."""
    names = catalog.tensors
    if not record.get("num_experts"):
        if any(name.endswith(".q_norm.weight") for name in names):
            return "qwen3", {}
        if any(name.endswith(".q_proj.bias") for name in names):
            return "qwen2", {}
        return "llama", {}
    experts = record["num_experts"]
    width = record.get("moe_ffn_hidden_size") or record["ffn_hidden_size"]
    config = {"num_experts_per_tok": record.get("moe_router_topk", 2)}
    if any("block_sparse_moe" in name for name in names):
        config |= {"num_local_experts": experts, "intermediate_size": width}
        return "mixtral", config
    config |= {
        "num_experts": experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "mlp_only_layers": _dense_layers(record),
    }
    return "qwen3_moe", config


def _dense_layers(record: Record) -> list[int]:
    """Return the layers without experts.

    ``moe_layer_freq`` is a list with a flag for each layer, or n where every nth has experts.
    """
    frequency = record.get("moe_layer_freq") or 1
    layers = range(record["num_layers"])
    if isinstance(frequency, list):
        return [layer for layer, flag in zip(layers, frequency, strict=False) if not flag]
    return [layer for layer in layers if layer % frequency]


def _check_names(model_type: str, config: Config, catalog: Catalog) -> tuple[Config | None, str]:
    """Add the sizes of tensors; None if these are not exactly the architecture's."""
    shapes = {name: entry.shape for name, entry in catalog.tensors.items()}
    embedding = shapes.get("model.embed_tokens.weight")
    gate = shapes.get("model.layers.0.mlp.gate_proj.weight")
    architecture = class_of({"model_type": model_type})
    config = {"architectures": [architecture], "model_type": model_type, **config}
    config |= {"vocab_size": embedding[0]} if embedding else {}
    config |= {"intermediate_size": gate[0]} if gate else {}
    expected = expected_names(config)
    if not expected:
        return None, f"the recorded sizes are none of a {architecture}"
    names = {name for name, entry in catalog.tensors.items() if state_category(entry) == "model"}
    if names == expected:
        return config, ""
    unexpected = sorted(names - expected)
    differing = unexpected or sorted(expected - names)
    what = "has no" if unexpected else "requires"
    return None, f"{architecture} {what} {list_some(differing, 3)}"


def expected_names(config: Mapping[str, Any]) -> set[str]:
    """Return every parameter's name in the files of a configuration's model; none if it is odd.

    The sizes of tensors that the model may lack need not be known.
    """
    names = {*(shapes_of({"vocab_size": 1, "intermediate_size": 1, **config}) or ())}
    return names - {HEAD} if config["tie_word_embeddings"] else names
