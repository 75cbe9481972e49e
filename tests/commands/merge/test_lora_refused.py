"""What is not understood of an adapter, or does not fit its base, is named and not ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES
from merge_adapters import Tensors, pair, run, save_adapter, save_base, some
from safetensors.torch import save_file

BASE = {
    "model.embed_tokens.weight": some(12, 6),
    "model.q.weight": some(5, 6),
    "model.q.bias": some(5),
    "model.logits_bias": some(5),
    "model.square.weight": some(6, 6),
    "model.codes.weight": torch.ones(5, 6, dtype=torch.int8),
    "model.count": torch.tensor([1, 2, 3]),
    "model.experts.gate_up_proj": some(2, 8, 6),
    "model.experts.down_proj": some(2, 6, 4),
}
EMBEDDING: Tensors = {
    "model.embed_tokens.lora_embedding_A": some(4, 12),
    "model.embed_tokens.lora_embedding_B": some(6, 4),
}
Q = pair("model.q", 5, 6)


@pytest.mark.parametrize(
    ("config", "tensors", "wanted"),
    [
        ({"peft_type": "LOHA"}, {"model.q.hada_w1_a": some(5, 4)}, "says peft_type LOHA"),
        (
            {},
            pair("model.q", 15, 5) | pair("model.q.base_layer.out_proj", 5, 5),
            "out_proj.lora_A.weight is of model.q, an nn.MultiheadAttention, whose out_proj PEFT",
        ),
        (
            {},
            Q | {"model.q.lora_embedding_A": some(4, 6)} | {"model.q.lora_embedding_B": some(5, 4)},
            "are the same part of one module",
        ),
        (
            {"use_dora": True},
            Q
            | {"model.q.lora_magnitude_vector": some(5)}
            | {"model.q.lora_magnitude_vector.weight": some(5, seed=1)},
            "lora_magnitude_vector.weight are the same part of one module",
        ),
        (
            {"bias": "lora_only"},
            Q | {"model.q.bias": some(5), "model.q.base_layer.bias": some(5, seed=1)},
            "are the same part of one module",
        ),
        ({"peft_type": 3}, Q, "says peft_type 3: only LORA is merged"),
        ({"peft_type": None}, Q, "says peft_type null: only LORA is merged"),
        ({"peft_type": "lora"}, Q, "says peft_type lora: only LORA is merged"),
        ({"peft_type": "IA3"}, {"model.q.ia3_l": some(5, 1)}, "says peft_type IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, Q, "'pissa_niter_4', which changes the base"),
        ({"init_lora_weights": "olora"}, Q, "'olora', which changes the base"),
        ({"init_lora_weights": "corda"}, Q, "'corda', which changes the base"),
        ({"init_lora_weights": "loftq"}, Q, "'loftq', which changes the base"),
        ({"init_lora_weights": "loftq"}, Q, "--onto takes the base that LoftQ left"),
        ({"init_lora_weights": "another"}, Q, "init_lora_weights 'another': not known"),
        ({"layer_replication": [[0, 2], [1, 2]]}, Q, "says layer_replication [[0, 2], [1, 2]]"),
        ({"use_qalora": True}, Q, "says use_qalora True: not supported"),
        ({"alora_invocation_tokens": [3]}, Q, "says alora_invocation_tokens [3]: not supported"),
        ({"kasa_config": {"beta": 1}}, Q, "says kasa_config {'beta': 1}: not supported"),
        ({"of_the_future": 3}, Q, "says of_the_future 3, which is not known of PEFT"),
        ({"lora_alpha": "8"}, Q, "lora_alpha"),
        ({"bias": "\ud800"}, Q, "adapter_config.json: 'utf-8' codec can't encode"),
        ({"rank_pattern": {"(": 3}}, Q, "pattern '(': "),
        ({"rank_pattern": {f"{'(' * 900}q{')' * 900}": 4}}, Q, "maximum recursion depth"),
        ({"rank_pattern": {"q{99999999999}": 4}}, Q, "is too long, or repeats too much"),
        (
            {"alpha_pattern": {"k{e}": 3}},
            Q,
            "adapter: adapter_config.json: pattern 'k{e}': cannot be read as Python's re does",
        ),
        ({"alpha_pattern": {"([a[:digit:]])*": 3}}, Q, "cannot be read as Python's re does"),
        ({"alpha_pattern": {"(?i)Q": 3}}, Q, "global flags not at the start"),
        ({"alpha_pattern": {r"(?<=\w*)q": 3}}, Q, "look-behind requires fixed-width pattern"),
        ({"bias": "all"}, Q, "says bias all, but the adapter lacks 1 bias: model.q.bias"),
        ({"bias": "all"}, Q | {"lm_head.decoder.bias": some(12)}, "leaves it out"),
        ({"bias": "lora_only"}, Q, "says bias lora_only, but the adapter lacks 1 bias"),
        ({"bias": "lora_only"}, Q, "PEFT 0.7 to 0.20 do not save the biases"),
        ({"bias": "all"}, Q, "--lora takes the folder that PEFT's save_pretrained writes"),
        ({"modules_to_save": ["embed_tokens"]}, Q, "--lora takes the folder that PEFT's"),
        ({"trainable_token_indices": [1]}, Q, "--lora takes the folder that PEFT's"),
        ({"bias": "some"}, Q, "Invalid enum value 'some'"),
        (
            {"modules_to_save": ["q", "embed_tokens"]},
            Q | {"model.q.bias": some(5)},
            "lacks model.embed",
        ),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, Q, "lacks model.embed_tokens.weight"),
        ({"trainable_token_indices": [1]}, Q, "the adapter lacks these rows"),
        ({"use_dora": True}, Q, "says use_dora, but no tensor is a magnitude vector"),
        ({}, Q | {"model.q.lora_magnitude_vector": some(5)}, "does not say use_dora"),
        ({"r": 5}, Q, "says r 5, but"),
        ({}, {"model.q.weight": some(5, 6)}, "model.q.weight, but no LoRA"),
        ({}, {"model.q.lora_A.weight": some(4, 6)}, "there is base_model.model.model.q.lora_A"),
        ({}, Q | {"model.q.lora_diag": some(4)}, "model.q.lora_diag is no part of a LoRA"),
        ({}, Q | {"model.norm.weight": some(6)}, "has no model.norm.weight"),
        ({}, Q | {"lm_head.weight": some(12, 6)}, "leaves it out"),
        ({}, Q | pair("model.k", 5, 6), "lacks 1 of 2 modules of"),
        (
            {"target_parameters": ["k.gate_up_proj", "k.down_proj"]},
            Q | pair("model.k", 5, 6) | pair("model.k.base_layer", 5, 6),
            "lacks 1 of 2 modules of",
        ),
        ({}, pair("model.q", 6, 5), "inputs come before outputs"),
        ({}, pair("model.q", 5, 7), "model.q.weight: [5, 6], but the product of"),
        ({}, pair("model.experts", 8, 6), "model.experts has down_proj, gate_up_proj"),
        ({}, pair("model.lm_head", 12, 6), "the LoRA is added to the embedding if"),
        ({}, pair("proj_out", 12, 6), "a base whose head is tied has none of its own"),
        ({}, pair("model.experts.0.up", 5, 6), "--experts packed"),
        ({}, Q | {"model.q.lora_B.bias": some(4)}, "model.q.lora_B.bias: [4], but model.q.bias"),
        ({}, Q | {"model.embed_tokens.weight": some(13, 6)}, "[13, 6], but"),
        (
            {},
            Q | {"model.embed_tokens.weight": some(13, 6)},
            "base.safetensors --rows 'model.embed_tokens.weight=13' --fill mean`",
        ),
        ({}, pair("model.codes", 5, 6), "model.codes.weight: int8, which is no type of a LoRA's"),
        ({}, Q | {"model.q.lora_B.bias": torch.tensor([1] * 5)}, "lora_B.bias: int64, which is no"),
        ({}, Q | {"model.count": some(3)}, "float32, int64 in"),
        (
            {"trainable_token_indices": [3, 12]},
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": some(2, 6)} | Q,
            "[2, 6] for 2 rows of model.embed_tokens.weight [12, 6]",
        ),
        (
            {"trainable_token_indices": {"embed_tokens": [3]}},
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": some(1, 6)} | EMBEDDING,
            "is not alone in changing model.embed_tokens.weight",
        ),
        (
            {"target_parameters": ["experts.gate_up_proj"], "r": 2},
            pair("model.experts", 7, 6, rank=4),
            "fit none of model.experts.gate_up_proj [2, 8, 6]",
        ),
    ],
)
def test_what_cannot_be_merged_is_named(
    config: dict[str, Any], tensors: Tensors, wanted: str, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tensors, **config)
    base = save_base(tmp_path / "base.safetensors", BASE)
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", base)
    assert code == 4, said
    assert wanted in said
    assert not (tmp_path / "out.safetensors").exists()


def test_no_square_weight_is_turned_because_a_config_says_so(tmp_path: Path) -> None:
    """Where nothing else has inputs first, that was said of a module without a LoRA any more."""
    base = {"model.q.weight": some(5, 6), "model.square.weight": some(6, 6)}
    tensors = Q | pair("model.square", 6, 6)
    adapter = save_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    model = save_base(tmp_path / "base.safetensors", base)
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", model)
    assert (code, "inputs or outputs come first" in said) == (4, True), said


def test_a_quantized_weight_needs_numbers(tmp_path: Path) -> None:
    folder = FIXTURES / "merged" / "quantized"
    code, said = run(tmp_path / "out", "--lora", folder / "adapter", "--onto", folder / "ckpt")
    assert (code, "quantized" in said) == (4, True)


def test_codes_in_the_place_of_a_weight_need_numbers(tmp_path: Path) -> None:
    """GPTQ and MXFP4 store no tensor of the weight's own name, which is not called missing."""
    codes = torch.zeros(4, 32, dtype=torch.int32)
    module = {"qweight": codes, "qzeros": codes[:1, :4].clone(), "scales": some(1, 32).half()}
    blocks, exponents = (torch.full((2, 8, 1, n), 120, dtype=torch.uint8) for n in (16, 1))
    experts = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": exponents[..., 0].clone()}
    model = save_base(
        tmp_path / "base.safetensors",
        {f"model.q.{name}": tensor for name, tensor in module.items()}
        | {f"model.experts.{name}": tensor for name, tensor in experts.items()},
    )
    packed = {"target_parameters": ["experts.gate_up_proj"], "r": 2}
    for number, (config, tensors) in enumerate(
        [({}, pair("model.q", 32, 32)), (packed, pair("model.experts", 8, 32))]
    ):
        adapter = save_adapter(tmp_path / f"{number}", tensors, **config)
        code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", model)
        assert (code, "--dequantize" in said) == (4, True), said


def test_separate_experts_of_a_packed_adapter_are_explained(tmp_path: Path) -> None:
    folder = FIXTURES / "merged" / "experts"
    code, said = run(tmp_path / "out", "--lora", folder / "adapter", "--onto", folder / "ckpt")
    assert code == 4
    assert "mlp.experts" in said


def test_an_adapter_without_its_config_is_explained(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base.safetensors", BASE)
    save_file(Q, tmp_path / "bare.safetensors")
    words = ("--lora", tmp_path / "bare.safetensors", "--onto", base)
    code, said = run(tmp_path / "out.safetensors", *words)
    assert code == 4
    assert "no adapter_config.json, which says by what the adapter is scaled" in said


def test_modules_that_are_twice_in_the_base_are_undetermined(tmp_path: Path) -> None:
    twice = {f"{name}.q.weight": some(5, 6) for name in ("student", "teacher")}
    adapter = save_adapter(tmp_path / "adapter", pair("q", 5, 6))
    base = save_base(tmp_path / "base.safetensors", twice)
    words = ("--lora", adapter, "--onto", base)
    code, said = run(tmp_path / "out.safetensors", *words)
    assert code == 4
    assert "2 times in" in said
    code, said = run(tmp_path / "out.safetensors", *words, "--select", "student")
    assert code == 0, said


@pytest.mark.parametrize("names", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_a_module_that_was_trained_apart_from_its_tie_is_refused(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    base = {"embed_tokens.weight": some(12, 6), "q.weight": some(5, 6)}
    save_file(base, folder / "model.safetensors", {"format": "pt"})
    trained = {f"{name}.weight": some(12, 6, seed=at) for at, name in enumerate(names)}
    tensors = pair("q", 5, 6) | trained
    adapter = save_adapter(tmp_path / "adapter", tensors, modules_to_save=[*names])
    words = ("--lora", adapter, "--onto", folder, "--dry-run")
    code, said = run(tmp_path / "out", *words)
    assert code == 4
    assert "trained apart from what" in said
    if "lm_head" in names:
        assets = tmp_path / "assets"
        assets.mkdir()
        untied = json.dumps(config | {"tie_word_embeddings": False})
        (assets / "config.json").write_text(untied)
        code, said = run(tmp_path / "out", *words, "--hf-assets", assets)
        assert code == 0, said


def test_two_changes_of_one_tensor_are_refused(tmp_path: Path) -> None:
    weight = some(12, 6)
    torch.save({"embed_tokens.weight": weight, "lm_head.weight": weight}, tmp_path / "b.pt")
    tensors = {name.removeprefix("model."): t for name, t in EMBEDDING.items()}
    adapter = save_adapter(tmp_path / "a", tensors | pair("lm_head", 12, 6))
    code, said = run(tmp_path / "o.pt", "--lora", adapter, "--onto", tmp_path / "b.pt")
    assert code == 4
    assert "are one tensor in" in said


def test_an_embedding_and_its_head_are_not_both_adapted(tmp_path: Path) -> None:
    """PEFT adds both to one weight, also if they are the same in training."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    save_base(folder / "model.safetensors", BASE)
    adapter = save_adapter(tmp_path / "a", EMBEDDING | pair("lm_head", 12, 6))
    code, said = run(tmp_path / "out", "--lora", adapter, "--onto", folder)
    both = "lm_head and model.embed_tokens are one tensor in"
    assert (code, both in said, "--drop lm_head` leaves one out" in said) == (4, True, True), said


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a|aa)+[bc]", f" takes more than 1 s to match model.{'a' * 40}"),
        ("a{99999999}b", ": is too long, or repeats too much"),
    ],
)
def test_a_pattern_that_takes_too_much_is_refused(pattern: str, why: str, tmp_path: Path) -> None:
    module = f"model.{'a' * 40}"
    config = {"rank_pattern": {pattern: 4}}
    adapter = save_adapter(tmp_path / "adapter", pair(module, 5, 6), **config)
    base = save_base(tmp_path / "base.safetensors", {f"{module}.weight": some(5, 6)})
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", base)
    assert code == 4
    assert f"pattern {pattern!r}{why}" in said


def test_the_base_is_one_checkpoint(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", Q)
    base = save_base(tmp_path / "base.safetensors", BASE)
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter)
    assert (code, "--lora: needs one base, 0 are given" in said) == (2, True)
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", adapter)
    assert (code, "is the base, too" in said) == (2, True)
    words = ("--lora", adapter, "--onto", base)
    code, said = run(tmp_path / "out.safetensors", *words, "--scale", "2")
    assert (code, "--scale: only with --add or --minus" in said) == (2, True)
    code, said = run(tmp_path / "out.safetensors", *words, "--add", base)
    assert (code, "one at a time" in said) == (2, True)


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "lm_head"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "proj_out"),
        ({"architectures": ["BertForMaskedLM"]}, "cls.predictions.decoder"),
    ],
)
def test_a_head_is_tied_unless_a_config_says_otherwise(
    config: dict[str, Any], head: str, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": some(12, 6), "q.weight": some(5, 6)}, folder / "model.safetensors")
    tensors = pair("q", 5, 6) | {f"{head}.weight": some(12, 6)}
    adapter = save_adapter(tmp_path / "adapter", tensors, modules_to_save=[head])
    code, said = run(tmp_path / "out", "--lora", adapter, "--onto", folder, "--dry-run")
    assert (code, f"{head}.weight: trained apart from what" in said) == (4, True), said


@pytest.mark.parametrize(("name", "is_kept"), [("wte", False), ("embed_tokens", True)])
def test_ties_are_kept_for_the_names_that_peft_keeps(
    name: str, tmp_path: Path, *, is_kept: bool
) -> None:
    """PEFT 0.21 ignores ensure_weight_tying for other embeddings, and trains them apart."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    base = {f"{name}.weight": some(12, 6), "q.weight": some(5, 6)}
    save_file(base, folder / "model.safetensors")
    tensors = pair("q", 5, 6) | {f"{name}.weight": some(12, 6, seed=5)}
    config = {"modules_to_save": [name], "ensure_weight_tying": True}
    adapter = save_adapter(tmp_path / "adapter", tensors, **config)
    code, said = run(tmp_path / "out", "--lora", adapter, "--onto", folder, "--dry-run")
    assert (code == 0) == is_kept, said


@pytest.mark.parametrize(
    ("new", "there"),
    [("lm_head", "output_projection"), ("model.projector.linear", "projector.linear")],
)
def test_a_new_module_beside_one_that_may_be_it_is_refused(
    new: str, there: str, tmp_path: Path
) -> None:
    tensors = pair("q", 5, 6) | {f"{new}.weight": some(12, 6)}
    adapter = save_adapter(tmp_path / "adapter", tensors, modules_to_save=[new])
    base = {"q.weight": some(5, 6), f"{there}.weight": some(12, 6)}
    save_base(tmp_path / "base.safetensors", base)
    words = ("--lora", adapter, "--onto", tmp_path / "base.safetensors")
    code, said = run(tmp_path / "out.safetensors", *words)
    assert code == 4
    assert f"a new tensor beside {there}.weight of" in said


def test_a_head_of_another_name_is_not_said_to_be_tied(tmp_path: Path) -> None:
    base = {"model.q.weight": some(5, 6), "output_projection.weight": some(12, 6)}
    adapter = save_adapter(tmp_path / "adapter", Q | pair("lm_head", 12, 6))
    words = ("--lora", adapter, "--onto", save_base(tmp_path / "base.safetensors", base))
    code, said = run(tmp_path / "out.safetensors", *words)
    assert (code, "tied" in said, "--rename 'REGEX=NEW'" in said) == (4, False, True), said


def test_a_head_that_is_tied_and_stored_is_refused(tmp_path: Path) -> None:
    """Whether transformers ties it depends on its bytes."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    weight = some(12, 6)
    base = {"model.embed_tokens.weight": weight, "lm_head.weight": weight.clone()}
    save_file(base, folder / "model.safetensors")
    adapter = save_adapter(tmp_path / "adapter", EMBEDDING)
    words = ("--lora", adapter, "--onto", folder, "--dry-run")
    code, said = run(tmp_path / "out", *words)
    assert code == 4
    assert "its files have both" in said
    code, said = run(tmp_path / "out", *words, "--drop", "lm_head.weight")
    assert code == 0, said
    assert "model.embed_tokens.weight is tied to the head: merged into both" in said


def test_loras_on_many_parameters_of_one_module_are_refused(tmp_path: Path) -> None:
    """Each of them fits each: to try all orders would take hours and all memory."""
    names = [f"experts.p{number}" for number in range(11)]
    tensors: Tensors = {}
    for depth in range(11):
        tensors |= pair(f"experts{'.base_layer' * depth}", 4, 4)
    adapter = save_adapter(tmp_path / "adapter", tensors, target_parameters=names, r=2)
    base = save_base(tmp_path / "base.safetensors", {name: some(2, 4, 4) for name in names})
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", base)
    assert code == 4, said
    assert "one of 11 LoRAs on 11 parameters of one module: too many to find out" in said
