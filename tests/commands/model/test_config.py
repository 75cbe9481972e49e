"""A config.json that goes with tensors must describe them: transformers' own models and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import convert_to
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Unsupported

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def llama() -> dict[str, torch.Tensor]:
    state = {"embed_tokens.weight": torch.randn(40, 16), "norm.weight": torch.ones(16)}
    for layer in ("layers.0", "layers.1"):
        state |= {
            f"{layer}.self_attn.q_proj.weight": torch.randn(16, 16),
            f"{layer}.self_attn.k_proj.weight": torch.randn(8, 16),
            f"{layer}.self_attn.v_proj.weight": torch.randn(8, 16),
            f"{layer}.mlp.gate_proj.weight": torch.randn(24, 16),
        }
    return {f"model.{n}": t for n, t in state.items()} | {"lm_head.weight": torch.randn(40, 16)}


def folder(path: Path, config: dict[str, Any] | None, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    save_file(tensors or llama(), path / "model.safetensors", {"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def codes(path: Path) -> list[str]:
    found = ckptool.verify(path, quick=True).findings
    return [finding.code for finding in found if finding.code != "no-checksum"]


WRONG = [
    ({"vocab_size": 41}, "vocab_size 41, but model.embed_tokens.weight has 40 rows"),
    ({"hidden_size": 32}, "hidden_size 32, but"),
    ({"num_hidden_layers": 3}, "num_hidden_layers 3, but found tensors of 2 layers"),
    ({"num_attention_heads": 8}, "has 8 rows"),
    ({"head_dim": 8}, "num_attention_heads 4 of size 8"),
    ({"num_key_value_heads": 4}, "num_key_value_heads 4 of size 4"),
    ({"intermediate_size": 25}, "intermediate_size 25"),
    ({"torch_dtype": "bfloat16"}, "torch_dtype bfloat16, but most elements are float32"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_a_config_of_another_model(change: dict[str, Any], words: str, out: Path) -> None:
    source = folder(out / "wrong", CONFIG | change)
    assert set(codes(source)) == {"config-mismatch"}
    with pytest.raises(Unsupported, match=r"config\.json says") as caught:
        convert_to("safetensors", source, out / "copy")
    assert words in caught.value.message
    assert not (out / "copy").exists()
    bare, assets = folder(out / "bare", None), MapOptions(assets=source)
    with pytest.raises(Unsupported, match=r"config\.json says"):
        convert_to("safetensors", bare, out / "copy", map=assets)


def test_a_config_of_a_wider_type_loses_nothing(out: Path) -> None:
    """As of torchtune, which copies that of the base."""
    wide = CONFIG | {"torch_dtype": "float32"}
    for dtype in (torch.bfloat16, torch.float16):
        state = {name: values.to(dtype) for name, values in llama().items()}
        source = folder(out / str(dtype), wide, **state)
        assert codes(source) == []
        convert_to("safetensors", source, out / f"{dtype}-copy")
    half = CONFIG | {"torch_dtype": "float16"}
    state = {name: values.bfloat16() for name, values in llama().items()}
    assert codes(folder(out / "half", half, **state)) == ["config-mismatch"]


def test_a_head_that_is_not_there(out: Path) -> None:
    tensors = {name: values for name, values in llama().items() if name != "lm_head.weight"}
    assert codes(folder(out / "m", CONFIG, **tensors)) == ["config-mismatch"]
    tied = CONFIG | {"tie_word_embeddings": True}
    assert codes(folder(out / "n", tied, **tensors)) == []


def test_a_config_of_this_model_is_copied_as_it_is(out: Path) -> None:
    source = folder(out / "m", CONFIG)
    assert codes(source) == []
    convert_to("safetensors", source, out / "copy")
    assert (out / "copy" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_cast_is_reported_in_the_config(out: Path) -> None:
    source = folder(out / "m", CONFIG)
    report = convert_to("safetensors", source, out / "copy", casts=Casts(BY_NAME["bfloat16"]))
    said = json.loads((out / "copy" / "config.json").read_text())
    assert said == CONFIG | {"torch_dtype": "bfloat16"}
    assert any("config.json: dtype set to bfloat16" in note for note in report.notes)
    assert codes(out / "copy") == []


def test_of_a_part_that_is_asked_for_it_is_a_note(out: Path) -> None:
    source = folder(out / "m", CONFIG)
    report = convert_to("safetensors", source, out / "copy", select=("model.layers.0.*",))
    assert any("tensors of 1 layers" in note for note in report.notes)
    assert len(load_file(out / "copy" / "model.safetensors")) == 4


def test_norms_and_biases_may_be_kept_in_another_type(out: Path) -> None:
    state = {n: t if t.ndim == 1 else t.bfloat16() for n, t in llama().items()}
    state |= {f"model.layers.0.self_attn.b{n}": torch.zeros(2) for n in range(20)}
    path = folder(out / "m", CONFIG | {"torch_dtype": "bfloat16"}, **state)
    assert codes(path) == []
    convert_to("safetensors", path, out / "copy")


def test_layers_that_predict_further_tokens_may_be_there_or_not(out: Path) -> None:
    for layers in (1, 2):
        config = CONFIG | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
        path = folder(out / str(layers), config)
        assert codes(path) == []


def test_layers_that_predict_further_tokens_need_not_be_counted(out: Path) -> None:
    """As transformers saves DeepSeek's config: it skips the tensors of those layers."""
    config = CONFIG | {"num_hidden_layers": 1}
    predicting = {"model.layers.1.eh_proj.weight": torch.ones(16, 32)}
    assert codes(folder(out / "m", config, **llama(), **predicting)) == []


def test_what_sees_beside_a_language_model_has_sizes_of_its_own(out: Path) -> None:
    """As SmolVLM and Voxtral are saved: text_config says how many heads the text has."""
    tower = "model.vision_tower.encoder.layers.0"
    seeing = {
        f"{tower}.self_attn.k_proj.weight": torch.randn(6, 6),
        f"{tower}.mlp.gate_proj.weight": torch.randn(10, 6),
    }
    state = {n.replace("model.", "model.language_model.", 1): t for n, t in llama().items()}
    config = {"model_type": "idefics3", "torch_dtype": "float32", "text_config": CONFIG}
    source = folder(out / "m", config | {"text_config": CONFIG}, **state, **seeing)
    assert codes(source) == []
    convert_to("safetensors", source, out / "copy")
    wrong = {"text_config": CONFIG | {"num_key_value_heads": 4}}
    assert (
        codes(folder(out / "wrong", config | wrong, **state, **seeing)) == ["config-mismatch"] * 2
    )


ROUTED = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": torch.ones(2, 16) for n in range(6)}
OWN_COUNTS: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = [
    (
        {"model_type": "mllama", "text_config": CONFIG | {"model_type": "mllama_text_model"}},
        {"model.embed_tokens.weight": torch.randn(48, 16)},
    ),
    ({"draft_vocab_size": 20}, {"lm_head.weight": torch.randn(20, 16)}),
    ({"n_routed_experts": 4, "zero_expert_num": 2}, ROUTED),
    ({"num_experts": 6, "moe_intermediate_size": [2, 2]}, ROUTED),  # a width a layer: HunYuan
    ({"text_config": {"torch_dtype": "float16"}}, {}),
    ({"num_hidden_layers": 4, "block_configs": []}, {"model.layers.3.x": torch.ones(2)}),
    (
        {"num_hidden_layers": 1, "num_nextn_predict_layers": 3},
        {"model.layers.1.eh_proj.weight": torch.ones(16, 32)},
    ),
]
"""Llama 3.2 Vision; a draft of EAGLE-3; LongCat-Flash; two types; a layer that does nothing; one of
three that predict."""


@pytest.mark.parametrize(("change", "tensors"), OWN_COUNTS)
def test_a_config_that_counts_in_its_own_way(
    change: dict[str, Any], tensors: dict[str, torch.Tensor], out: Path
) -> None:
    source = folder(out / "m", CONFIG | change, **llama() | tensors)
    assert codes(source) == []
    convert_to("safetensors", source, out / "copy")


def test_what_is_not_there_is_reported(out: Path) -> None:
    assert codes(folder(out / "m", None)) == ["config-missing"]
    adapter = out / "adapter"
    adapter.mkdir()
    save_file(
        {"base_model.model.x.lora_A.weight": torch.ones(2)}, adapter / "adapter_model.safetensors"
    )
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert codes(adapter) == ["base-model-missing"]
    assert ckptool.verify(adapter, strict=True).ok


@pytest.mark.parametrize("value", [{}, [], ["llama"], {"llama": 1}, True, 1e308, None])
def test_a_config_of_odd_values_is_no_fault_of_ckptool(value: Any, out: Path) -> None:
    odd = [dict.fromkeys(["text_config", "vision_config", name], value) for name in CONFIG]
    for at, said in enumerate([{"model_type": value}, dict.fromkeys(CONFIG, value), *odd]):
        codes(folder(out / str(at), CONFIG | said))


def test_a_config_that_cannot_be_read(out: Path) -> None:
    source = folder(out / "m", CONFIG)
    (source / "config.json").write_text("{")
    assert codes(source) == ["metadata-unreadable"]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 8}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_head": 4, "n_layer": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 8, "ffn_dim": 24}),
    "bert": ("BertForMaskedLM", {}),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 8}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 4, "num_heads": 4}),
    "mamba": ("MambaForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"n_routed_experts": 8, "moe_intermediate_size": 8}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_own_models_are_described(kind: str, out: Path) -> None:
    transformers = pytest.importorskip("transformers")
    name, extra = MODELS[kind]
    small = {k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")}
    small["tie_word_embeddings"] = kind in (
        "gpt2",
        "opt",
        "bert",
        "albert",
        "t5",
        "gemma2",
    )
    config = transformers.AutoConfig.for_model(**{**small, "model_type": kind, **extra})
    getattr(transformers, name)(config).save_pretrained(out / "m")
    assert codes(out / "m") == []
