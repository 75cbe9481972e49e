"""A config.json made from the checkpoint alone: transformers loads the model with it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import convert_to, flat, load_dcp
from safetensors import safe_open

from ckptool.commands.model.hf_config import expected_names
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported

ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-4,
    "rotary_base": 50000,
    "rotary_percent": 1.0,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 103,
    "padded_vocab_size": 112,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
}
PARAMS = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-4,
    "vocab_size": -1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True},
    ),
    "qwen3_moe_and_dense": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
}  # fmt: skip
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 103,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
}


def original(family: str, folder: Path, **more: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    name, extra = MODELS[family]
    config = getattr(transformers, f"{name}Config")(**SMALL | extra | more)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    import transformers

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.arange(40).reshape(2, 20) * 2).logits


@pytest.mark.parametrize(
    ("family", "name", "more"),
    [
        ("llama", "megatron-gpt", {}),
        ("llama_tied", "megatron-gpt", {"untie_embeddings_and_output_weights": False}),
        ("qwen2", "megatron-gpt", {}),
        ("qwen3", "megatron-gpt", {}),
        ("mixtral", "megatron-mixtral", EXPERTS),
        ("qwen3_moe", "megatron-moe", EXPERTS),
        ("qwen3_moe_and_dense", "megatron-moe", EXPERTS | {"moe_layer_freq": [1, 0]}),
        ("qwen3_moe_and_dense", "megatron-moe", EXPERTS | {"moe_layer_freq": 2}),
    ],
)
def test_from_megatrons_arguments(family: str, name: str, more: dict[str, Any], out: Path) -> None:
    source = original(family, out / "original")
    convert_to("dcp", source, out / "there", map=MapOptions(name, {"extra": 9}))
    state = flat(load_dcp(out / "there")) | {"args": argparse.Namespace(**ARGS | more)}
    dcp.save(state, checkpoint_id=out / "trained", no_dist=True)
    convert_to("safetensors", out / "trained", out / "back", map=MapOptions(name), model_only=True)
    assert {path.name for path in (out / "back").iterdir()} == {"config.json", "model.safetensors"}
    assert torch.equal(logits(out / "back"), logits(source))


@pytest.mark.parametrize("theta", [None, 50000.0])
def test_from_metas_params(theta: float | None, out: Path) -> None:
    rope = {"rope_theta": theta or 10000.0, "rope_type": "default"}
    source = original("llama", out / "original", rope_parameters=rope)
    meta = out / "meta"
    meta.mkdir()
    convert_to("torch-save", source, meta / "consolidated.00.pth", map=MapOptions("meta-llama"))
    params = PARAMS | ({"rope_theta": theta} if theta else {})
    (meta / "params.json").write_text(json.dumps(params))
    convert_to("safetensors", meta, out / "back", map=MapOptions("meta-llama"))
    assert torch.equal(logits(out / "back"), logits(source))


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "rotary_interleaved"])
def test_a_model_whose_values_mean_something_else_is_refused(name: str, out: Path) -> None:
    state = {"embedding.word_embeddings.weight": torch.zeros(112, 32)}
    args = {"args": argparse.Namespace(**ARGS, **{name: True})}
    dcp.save(state | args, checkpoint_id=out / "a", no_dist=True)
    with pytest.raises(Unsupported, match=name):
        convert_to("safetensors", out / "a", out / "b", map=MapOptions("megatron-gpt"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type is"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"norm_epsilon": None}, "norm_epsilon is not recorded"),
        ({"use_rope_scaling": True}, "use_rope_scaling is True"),
        ({"multi_latent_attention": True}, "multi_latent_attention is True"),
        ({"window_size": (128, 0)}, "window_size is"),
        ({"use_mup": True}, "use_mup is True, which is not supported"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value is 7.0"),
        (EXPERTS | {"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input is True"),
        ({"of_next_year": 3}, "of_next_year is 3, which is not supported"),
        ({"of_next_year": 0.0}, "of_next_year is 0.0, which is not supported"),
        ({"of_next_year": None, "lr": 1e-4, "moe_router_topk": 2}, "LlamaForCausalLM requires"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        (EXPERTS | {"num_layers": 10**12}, "num_layers is 1000000000000"),
        (EXPERTS | {"moe_layer_freq": "[0]*2"}, "moe_layer_freq is '[0]*2'"),
        ({"kv_channels": [8]}, "the recorded sizes are none of a LlamaForCausalLM"),
    ],
)
def test_no_config_is_made_where_not_enough_is_recorded(
    more: dict[str, Any], words: str, out: Path
) -> None:
    state = {
        "embedding.word_embeddings.weight": torch.zeros(112, 32),
        "args": argparse.Namespace(**ARGS | more),
    }
    dcp.save(state, checkpoint_id=out / "a", no_dist=True)
    options = MapOptions("megatron-gpt")
    report = convert_to("safetensors", out / "a", out / "b", map=options, model_only=True)
    assert [path.name for path in (out / "b").iterdir()] == ["model.safetensors"]
    assert any("config.json not written" in note and words in note for note in report.notes)
    assert report.map.moves[0].entry.shape == (103, 32)


@pytest.mark.parametrize("family", MODELS)
def test_the_names_of_an_architecture_are_those_that_transformers_writes(
    family: str, out: Path
) -> None:
    folder = original(family, out / "original")
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert expected_names({"mlp_only_layers": [], "num_experts": 4} | config) == set(
            file.keys()
        )


def without(*ends: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {n: t for n, t in state.items() if not n.endswith(ends)}


@pytest.mark.parametrize(
    ("family", "name", "more", "change", "words"),
    [
        (
            "qwen3_moe",
            "megatron-moe",
            EXPERTS,
            without("q_layernorm.weight", "k_layernorm.weight"),
            "Qwen3MoeForCausalLM requires model.layers.0.self_attn.k_norm.weight",
        ),
        (
            "qwen3",
            "megatron-gpt",
            {"add_qkv_bias": True},
            lambda state: (
                state
                | {
                    f"decoder.layers.{i}.self_attention.linear_qkv.bias": torch.ones(64)
                    for i in (0, 1)
                }
            ),
            "Qwen3ForCausalLM has no model.layers.0.self_attn.k_proj.bias",
        ),
    ],
)
def test_no_config_is_made_of_an_architecture_with_other_parameters(
    family: str, name: str, more: dict[str, Any], change: Any, words: str, out: Path
) -> None:
    source = original(family, out / "original")
    convert_to("dcp", source, out / "there", map=MapOptions(name, {"extra": 9}))
    state = change(flat(load_dcp(out / "there"))) | {"args": argparse.Namespace(**ARGS | more)}
    dcp.save(state, checkpoint_id=out / "trained", no_dist=True)
    options = {"map": MapOptions(name), "model_only": True}
    report = convert_to("safetensors", out / "trained", out / "back", **options)
    assert [path.name for path in (out / "back").iterdir()] == ["model.safetensors"]
    assert any(words in note for note in report.notes), report.notes
