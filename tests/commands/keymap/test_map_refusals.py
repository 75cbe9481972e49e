"""What does not fit a key map, and models that are nearly those of one."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, convert_to
from keymap.mapped_models import HEADS, LLAMA, all_bits, assets, mapped, refusal, save, state

import ckptool
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Damaged, UsageError


def test_a_tensor_that_no_rule_takes_is_listed(out: Path) -> None:
    source = save(out / "a", state() | {"layers.0.surprise.weight": torch.zeros(2)})
    error = refusal(mapped, source, out / "b")
    assert isinstance(error, UsageError)
    assert "layers.0.surprise.weight" in error.message
    assert "has no rule for 1 of" in error.message
    kept = mapped(source, out / "b", drop=("*surprise*",))
    assert kept == all_bits(state(side="hf"))


def test_a_name_that_is_made_twice_is_listed(out: Path) -> None:
    source = save(out / "a", state() | {"output.weight": torch.zeros(10, 16)})
    error = refusal(mapped, source, out / "b")
    assert "lm_head.weight, from lm_head.weight and from output.weight" in error.message


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({}, "size of head, kv not found"),
        ({"head": 4}, "size of kv not found"),
        ({"head": 4, "kv": 4}, "the given dims are wrong"),
        ({"head": 3, "kv": 2}, "does not match [(head pair two) hidden] with head 3"),
        ({"heads": 4}, "unknown dim"),
    ],
)
def test_dims_that_are_missing_or_wrong(dims: dict[str, int], words: str, out: Path) -> None:
    error = refusal(mapped, save(out / "a", state()), out / "b", MapOptions(LLAMA.name, dims))
    assert words in error.message
    assert "needs" not in words or "--dim kv=N" in (error.hint or "")


def test_an_expert_that_is_missing_is_named(out: Path) -> None:
    hf = state("qwen3_moe", "hf")
    del hf["model.layers.1.mlp.experts.1.up_proj.weight"]
    error = refusal(mapped, save(out / "a", hf), out / "b", MapOptions("torchtitan-qwen3"))
    assert "model.layers.1.mlp.experts.1.up_proj.weight" in error.message


def test_a_number_past_all_reason_is_refused_at_once(out: Path) -> None:
    hf = state("qwen3_moe", "hf")
    hf["model.layers.1.mlp.experts.999999999.down_proj.weight"] = torch.zeros(8, 4)
    error = refusal(mapped, save(out / "a", hf), out / "b", MapOptions("torchtitan-qwen3"))
    assert "experts.5.down_proj.weight, and 999,999,993 more" in error.message


@pytest.mark.parametrize(
    ("family", "last", "key_map", "words"),
    [
        ("qwen3_moe", "1.mlp.experts.2.", "torchtitan-qwen3", "expert is 3 in .*gate.*, but 2 in"),
        ("llama3", "1.self_attn.o_proj", "megatron-gpt", "layer is 1 in .*o_proj.*, but 2 in"),
    ],
)
def test_the_last_of_a_kind_that_is_missing_is_noticed(
    family: str, last: str, key_map: str, words: str, out: Path
) -> None:
    hf = {n: t for n, t in state(family, "hf").items() if last not in n}
    options = MapOptions(key_map, HEADS, inverse=True)
    error = refusal(mapped, save(out / "a", hf), out / "b", options)
    assert re.search(words, error.message)


def test_shards_that_are_missing_are_damage_still(out: Path) -> None:
    source = save(out / "a", state())
    data = source / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-900])
    assert isinstance(refusal(mapped, source, out / "b"), Damaged)


def test_names_of_a_model_that_config_says_is_another_are_not_enough(
    tmp_path: Path, out: Path
) -> None:
    """SeedOSS' names are Llama's, and no config says whether both compute the same."""
    source = save(out / "a", state(side="hf"))
    other = assets(tmp_path / "other", "seed_oss")
    with pytest.raises(UsageError, match=r"model_type in config\.json is seed_oss") as caught:
        mapped(source, out / "b", MapOptions("auto", assets=other))
    named = (caught.value.hint or "").split()[2]  # use --map NAME
    report = convert_to("dcp", source, out / "b", map=MapOptions(named, assets=other))
    (warning,) = report.map.warnings
    assert "but the model_type in config.json is seed_oss" in warning
    assert warning in report.notes


FUNCTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "Granite": ({"embedding_multiplier": 12.0, "logits_scaling": 8}, "embedding_multiplier is 12"),
    "Cohere": ({"use_qk_norm": True}, "attention and MLP are in parallel"),
    "SmolLM3": ({"no_rope_layer_interval": 2}, "layers 1 have no rotary embeddings"),
    "Gemma": ({"head_dim": 4}, "norms multiply by weight"),
    "Arcee": ({}, "the activation is relu2"),
    "Olmo2": ({}, "norms follow attention and MLP"),
    "Olmo3": ({}, "norms follow attention and MLP"),
    "Llama4Text": ({"no_rope_layer_interval": 2}, "layers 1 have no rotary embeddings"),
}


@pytest.mark.parametrize("family", FUNCTIONS)
def test_a_map_forced_on_a_model_that_computes_otherwise_is_refused(
    family: str, tmp_path: Path, out: Path
) -> None:
    """By what transformers itself writes into the model's config.json."""
    transformers = pytest.importorskip("transformers")
    more, words = FUNCTIONS[family]
    config = getattr(transformers, f"{family}Config")(
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=16,
        intermediate_size=6,
        vocab_size=10,
        tie_word_embeddings=False,
        num_hidden_layers=2,
        **more,
    )
    config.save_pretrained(tmp_path / "other")
    source = save(out / "a", state(side="hf"))
    forced = MapOptions("torchtitan-llama3", assets=tmp_path / "other")
    error = refusal(mapped, source, out / "b", forced)
    assert words in error.message
    assert not (out / "b").exists()
    options: dict[str, Any] = {"map": "torchtitan-llama3", "hf_assets": tmp_path / "other"}
    for read in (partial(ckptool.load, source, {}), partial(ckptool.diff, source, source)):
        assert words in refusal(read, **options).message
    # A Llama's config.json beside it does not say otherwise: the target gets the one that is given.
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert words in refusal(mapped, source, out / "b", forced).message
    own = tmp_path / "own.toml"
    own.write_text(
        f"include = ['torchtitan-llama3']\nmodel_types = ['{config.model_type}']\n"
        "from = 'torchtitan'\nto = 'Hugging Face'\n"
    )
    mapped(source, out / "c", MapOptions(str(own), assets=tmp_path / "other"))


def test_heads_that_are_normed_are_none_of_mixtrals(out: Path) -> None:
    names = [
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
    ]
    source = save(out / "a", {names[0]: torch.ones(4, 8), names[1]: torch.ones(8)})
    with pytest.raises(UsageError, match="q_layernorm"):
        mapped(source, out / "b", MapOptions("megatron-mixtral"))
    report = convert_to("dcp", source, out / "c", map=MapOptions("auto"))
    assert report.map.name == "megatron-moe"


MTP = {"layers": 2, "vocab": 6}


@pytest.mark.parametrize("name", ["torchtitan-deepseek-v3", "megatron-deepseek-v3"])
def test_copies_of_the_embedding_for_further_tokens_are_accepted(name: str, out: Path) -> None:
    words = torch.arange(24.0).reshape(6, 4)
    further = {
        "model.layers.2.embed_tokens.weight": words,
        "model.layers.2.enorm.weight": torch.ones(4),
    }
    dims = {k: v for k, v in MTP.items() if name.startswith("megatron") or k == "layers"}
    options = MapOptions(name, dims, inverse=True)
    source = save(out / "a", {"model.embed_tokens.weight": words} | further)
    found = mapped(source, out / "b", options)
    assert len(found) == 2
    assert bits(words) in found.values()
    del dims["layers"]
    with pytest.raises(UsageError, match="size of layers not found"):
        mapped(source, out / "c", MapOptions(name, dims, inverse=True))


def test_a_copy_of_the_embedding_that_differs_is_refused(out: Path) -> None:
    words = torch.arange(24.0).reshape(6, 4)
    names = ["model.embed_tokens.weight", "model.layers.2.embed_tokens.weight"]
    source = save(out / "a", {names[0]: words, names[1]: words + 1})
    with pytest.raises(Damaged, match=r"tok_embeddings\.weight"):
        mapped(source, out / "b", MapOptions("torchtitan-deepseek-v3", {"layers": 2}, inverse=True))
