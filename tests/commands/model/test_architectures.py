"""The tensors of architectures, against the models that transformers makes and saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckptool.commands.model.architectures import class_of, is_tied, shapes_of

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 12}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 6}),
    ("mistral", {"head_dim": 6}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 6}),
    ("qwen3", {"head_dim": 4, "attention_bias": True}),
    ("gemma", {"head_dim": 6}),
    ("gemma2", {"head_dim": 6, "attention_bias": True}),
    ("gemma3_text", {"head_dim": 6}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True}),
    ("phi3", {}),
    ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    ("olmoe", {"num_experts": 3, "num_experts_per_tok": 1}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 28}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 28, "qkv_bias": False}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 6, "mlp_only_layers": [1]}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 6, "decoder_sparse_step": 2}),
]


def saved(model_type: str, more: dict[str, Any], out: Path) -> dict[str, Any]:
    """A model that transformers saved; its config."""
    from transformers import AutoModelForCausalLM  # a second, in each worker that collects
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**SIZES | more)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(out)
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(("model_type", "more"), MODELS)
def test_the_tensors_are_those_that_transformers_saves(
    model_type: str, more: dict[str, Any], tmp_path: Path
) -> None:
    config = saved(model_type, more, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    shapes = shapes_of(config)
    assert shapes is not None
    head = shapes.pop("lm_head.weight")
    assert is_tied(config) == ("lm_head.weight" not in written)
    assert shapes | ({} if is_tied(config) else {"lm_head.weight": head}) == written
    assert [class_of(config)] == config["architectures"]


LLAMA = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "no-such-model"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"quantization_config": {"quant_method": "gptq"}},
        {"auto_map": {"AutoModel": "model.Model"}},
        {"vocab_size": None},
        {"hidden_size": "4"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 10**12},
        {"model_type": "qwen3"},  # head_dim is 128 where none is stated: not assumed
        {"model_type": "mixtral"},  # experts are not counted
    ],
)
def test_nothing_is_guessed(change: dict[str, Any]) -> None:
    assert shapes_of(LLAMA) is not None
    assert shapes_of(LLAMA | change) is None


MIXTURE = {**LLAMA, "model_type": "qwen3_moe", "head_dim": 2, "num_key_value_heads": 2, **EXPERTS}


@pytest.mark.parametrize(
    "change",
    [
        {"decoder_sparse_step": "2"},
        {"decoder_sparse_step": [1]},
        {"mlp_only_layers": 3},
        {"num_hidden_layers": 4096, "num_experts": 4096},  # 50 million names
    ],
)
def test_a_config_with_odd_experts_is_not_understood(change: dict[str, Any]) -> None:
    assert shapes_of(MIXTURE) is not None
    assert shapes_of({**MIXTURE, **change}) is None
