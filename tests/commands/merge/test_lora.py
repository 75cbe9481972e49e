"""A merged adapter is what PEFT makes of it, and what torch computes in 64 bits, cast once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import FIXTURES, Case, bits
from merge_adapters import Tensors, pair, run, save_adapter, save_base, some
from safetensors.torch import load_file

import ckptool
from ckptool.commands.merge.adapter import Settings, _ending
from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather
from ckptool.core.dtype import DType
from ckptool.engine.formulas.low_rank import LowRank
from ckptool.storage.files import SPAN

OPTIONS = {
    "experts": ("--experts", "packed"),
    "quantized": ("--dequantize", "--dtype", "fp32"),
}
"""What a fixture's base needs: files have experts apart, and codes for numbers."""


def merged(out: Path, adapter: Path, base: Path, *words: str) -> Tensors:
    code, said = run(out, "--lora", adapter, "--onto", base, *words)
    assert code == 0, said
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def delta(tensors: Tensors, module: str) -> torch.Tensor:
    left, right = (tensors[f"{module}.lora_{side}.weight"].double() for side in "BA")
    return left @ right


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "dora", "tied", "experts", "quantized"),
        *("conv1d", "conv1d_dora", "conv2d", "tokens"),
    ],
)
def test_the_result_is_that_of_peft_in_64_bits_rounded_once(name: str, tmp_path: Path) -> None:
    folder, truth = FIXTURES / "merged" / name, Case(f"merged/{name}").truth
    words = OPTIONS.get(name, ())
    found = merged(tmp_path / "out", folder / "adapter", folder / "ckpt", *words)
    assert {name: bits(tensor) for name, tensor in found.items()} == truth


def test_numbers_of_a_quantized_weight_are_rounded_with_the_sum(tmp_path: Path) -> None:
    folder, truth = FIXTURES / "merged" / "quantized", Case("merged/quantized").truth
    found = merged(tmp_path / "out", folder / "adapter", folder / "ckpt", "--dequantize")
    for name, tensor in found.items():
        if "_proj.weight" in name:
            wanted = torch.frombuffer(bytearray(truth[name][2]), dtype=torch.float32)
            assert torch.equal(tensor, wanted.reshape(tensor.shape).bfloat16()), name


def test_config_and_tokenizer_come_from_the_base(tmp_path: Path) -> None:
    folder = FIXTURES / "merged" / "plain"
    merged(tmp_path / "out", folder / "adapter", folder / "ckpt")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == json.loads((folder / "ckpt" / "config.json").read_text())
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_weight_of_many_tiles_is_the_sum_in_64_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {
        "layers.0.proj.weight": some(700, 2100, dtype=dtype),
        "layers.0.proj.bias": some(700, seed=7, dtype=dtype),
        "layers.0.norm.weight": some(2100, dtype=dtype),
    }
    tensors = pair("layers.0.proj", 700, 2100, rank=20)
    adapter = save_adapter(tmp_path / "adapter", tensors, r=20, use_rslora=True)
    base = save_base(tmp_path / "base.safetensors", weights)
    wanted = weights["layers.0.proj.weight"].double()
    wanted += delta(tensors, "layers.0.proj") * (8 / 20**0.5)
    found = merged(tmp_path / "out.safetensors", adapter, base)
    assert found["layers.0.proj.weight"].dtype == dtype
    if dtype == torch.float64:  # the last bit is that of a sum's order
        assert torch.allclose(found["layers.0.proj.weight"], wanted, rtol=1e-13, atol=1e-13)
    else:
        assert torch.equal(found["layers.0.proj.weight"], wanted.to(dtype))
    for name in ("layers.0.proj.bias", "layers.0.norm.weight"):
        assert torch.equal(found[name], weights[name])


def test_bits_are_the_same_in_any_format_and_sharding(tmp_path: Path) -> None:
    weights = {"proj.weight": some(900, 1300)}
    base = save_base(tmp_path / "base.safetensors", weights)
    adapter = save_adapter(tmp_path / "adapter", pair("proj", 900, 1300))
    plain = merged(tmp_path / "plain.safetensors", adapter, base)
    sharded = tmp_path / "sharded"
    ckptool.reshard(base, sharded, mesh="dp=2,tp=3", shard="proj.weight=Shard(0),Shard(1)")
    code, said = run(tmp_path / "out", "--lora", adapter, "--onto", sharded, "--to", "dcp")
    assert code == 0, said
    with ckptool.open(tmp_path / "out") as opened:
        found = torch.as_tensor(opened.read("proj.weight"))
        columns = torch.as_tensor(opened.read("proj.weight", (slice(None), slice(1100, 1111))))
    assert torch.equal(found, plain["proj.weight"])
    assert torch.equal(columns, plain["proj.weight"][:, 1100:1111])


def test_an_adapter_that_torch_saved_is_merged(tmp_path: Path) -> None:
    folder = FIXTURES / "merged" / "plain"
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "adapter", adapter)
    weights = load_file(adapter / "adapter_model.safetensors")
    torch.save(weights, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    found = merged(tmp_path / "out", adapter, folder / "ckpt")
    assert {n: bits(t) for n, t in found.items()} == Case("merged/plain").truth


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_of_one_tensor_have_outputs_or_inputs_first(
    is_turned: bool, tmp_path: Path
) -> None:
    """As PEFT: A has a row for each expert and rank, B a column for each rank and expert."""
    experts, outputs, inputs = 3, 10, 6
    shape = (experts, inputs, outputs) if is_turned else (experts, outputs, inputs)
    square = some(experts, 6, 6, seed=9)
    base = {"mlp.experts.gate_up_proj": some(*shape), "mlp.experts.down_proj": square}
    tensors = pair("mlp.experts.base_layer", outputs, inputs, rank=2 * experts)
    tensors |= pair("mlp.experts", 6, 6, rank=2 * experts, seed=4)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = save_adapter(tmp_path / "a", tensors, r=2, target_parameters=targets)
    found = merged(tmp_path / "o.safetensors", adapter, save_base(tmp_path / "b.safetensors", base))
    for name, inner in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
        right = tensors[f"mlp.experts{inner}.lora_A.weight"].double()
        left = tensors[f"mlp.experts{inner}.lora_B.weight"].double()
        by_expert = torch.einsum(
            "ore,eri->eio" if is_turned else "ore,eri->eoi",
            left.reshape(left.shape[0], -1, experts),
            right.reshape(experts, -1, right.shape[1]),
        )
        weight = base[f"mlp.experts.{name}"]
        wanted = (weight.double() + by_expert * 4).float()
        assert torch.equal(found[f"mlp.experts.{name}"], wanted), name


@pytest.mark.parametrize("said", [True, False])
def test_a_bias_shows_that_inputs_come_first_whatever_a_config_says(
    said: bool, tmp_path: Path
) -> None:
    """PEFT goes by the class of a layer: its config says that of the last one with a LoRA.

    Conv1D is a stack's of layers, as GPT-2's beside a ViT.
    """
    base = {
        "decoder.h.0.c_attn.weight": some(6, 18),
        "decoder.h.0.c_attn.bias": some(18),
        "decoder.h.0.c_proj.weight": some(6, 6),
        "encoder.layer.0.up.weight": some(18, 6),
        "encoder.layer.0.up.bias": some(18),
        "encoder.layer.0.query.weight": some(6, 6),
        "lm_head.weight": some(9, 6),
    }
    modules = {"decoder.h.0.c_proj": 6, "encoder.layer.0.query": 6, "lm_head": 9}
    tensors = {n: t for m, out in modules.items() for n, t in pair(m, out, 6).items()}
    adapter = save_adapter(tmp_path / "a", tensors, fan_in_fan_out=said)
    found = merged(tmp_path / "o.safetensors", adapter, save_base(tmp_path / "b.safetensors", base))
    for module in modules:
        product = delta(tensors, module) * 2
        product = product.T if "decoder" in module else product
        wanted = (base[f"{module}.weight"].double() + product).float()
        assert torch.equal(found[f"{module}.weight"], wanted), module


def test_experts_apart_are_modules_as_all_others(tmp_path: Path) -> None:
    names = [f"mlp.experts.{index}.up_proj" for index in range(3)]
    base = {f"{name}.weight": some(5, 6, seed=i) for i, name in enumerate(names)}
    tensors = {n: t for i in (0, 2) for n, t in pair(names[i], 5, 6, seed=i + 5).items()}
    adapter = save_adapter(tmp_path / "a", tensors)
    found = merged(tmp_path / "o.safetensors", adapter, save_base(tmp_path / "b.safetensors", base))
    for index, name in enumerate(names):
        wanted = base[f"{name}.weight"]
        if index != 1:
            wanted = (wanted.double() + delta(tensors, name) * 2).float()
        assert torch.equal(found[f"{name}.weight"], wanted)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.layers.0.q", "layers.0.q"),
        ("layers.0.q", "model.layers.0.q"),
        ("model.layers.0.q", "language_model.model.layers.0.q"),
        ("transformer.h.0.q", "h.0.q"),
    ],
)
def test_a_base_may_have_another_prefix(theirs: str, ours: str, tmp_path: Path) -> None:
    base = {f"{ours}.weight": some(5, 6), "norm.weight": some(6)}
    tensors = pair(theirs, 5, 6)
    found = merged(
        tmp_path / "o.safetensors",
        save_adapter(tmp_path / "a", tensors),
        save_base(tmp_path / "b.safetensors", base),
    )
    wanted = (base[f"{ours}.weight"].double() + delta(tensors, theirs) * 2).float()
    assert torch.equal(found[f"{ours}.weight"], wanted)
    assert torch.equal(found["norm.weight"], base["norm.weight"])


@pytest.mark.parametrize("head", ["language_model.lm_head", "lm_head"])
def test_files_of_models_of_parts_have_other_names(head: str, tmp_path: Path) -> None:
    """Of transformers since 4.52: the names in memory are others than those in files."""
    text = "language_model.model" if head.startswith("language") else "model"
    names = {
        "model.language_model.layers.0.q": f"{text}.layers.0.q",
        "model.vision_tower.layers.0.q": "vision_tower.layers.0.q",
        "lm_head": head,
    }
    base = {f"{name}.weight": some(5, 6, seed=at) for at, name in enumerate(names.values())}
    base["multi_modal_projector.linear.weight"] = some(3, 4)
    tensors = {n: t for at, name in enumerate(names) for n, t in pair(name, 5, 6, seed=at).items()}
    projector = {"model.multi_modal_projector.linear.weight": some(3, 4, seed=9)}
    adapter = save_adapter(
        tmp_path / "a", tensors | projector, modules_to_save=["multi_modal_projector"]
    )
    found = merged(tmp_path / "o.safetensors", adapter, save_base(tmp_path / "b.safetensors", base))
    assert found.keys() == base.keys()
    for theirs, ours in names.items():
        wanted = (base[f"{ours}.weight"].double() + delta(tensors, theirs) * 2).float()
        assert torch.equal(found[f"{ours}.weight"], wanted), ours
    assert torch.equal(found["multi_modal_projector.linear.weight"], some(3, 4, seed=9))


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_head_of_gpt_neox_has_another_name_in_files(tmp_path: Path, *, is_whole: bool) -> None:
    """As of transformers 5: ``lm_head`` in memory, ``embed_out`` in files."""
    base = {"gpt_neox.q.weight": some(5, 6), "embed_out.weight": some(12, 6, seed=3)}
    head = {"lm_head.weight": some(12, 6, seed=4)} if is_whole else pair("lm_head", 12, 6)
    config = {"modules_to_save": ["lm_head"]} if is_whole else {}
    adapter = save_adapter(tmp_path / "a", pair("gpt_neox.q", 5, 6) | head, **config)
    found = merged(tmp_path / "o.safetensors", adapter, save_base(tmp_path / "b.safetensors", base))
    wanted = (
        base["embed_out.weight"].double() + delta(pair("lm_head", 12, 6), "lm_head") * 2
    ).float()
    assert found.keys() == base.keys()
    assert torch.equal(found["embed_out.weight"], head.get("lm_head.weight", wanted))


def test_what_is_tied_by_its_bytes_stays_so(tmp_path: Path) -> None:
    weight = some(12, 6)
    torch.save({"embed_tokens.weight": weight, "head.weight": weight}, tmp_path / "b.pt")
    tensors = {
        "embed_tokens.lora_embedding_A": some(4, 12, seed=1),
        "embed_tokens.lora_embedding_B": some(6, 4, seed=2),
    }
    adapter = save_adapter(tmp_path / "a", tensors)
    code, said = run(tmp_path / "o.pt", "--lora", adapter, "--onto", tmp_path / "b.pt")
    assert code == 0, said
    assert "tied to head.weight: merged into both, as PEFT's merge_and_unload does" in said
    right, left = (tensor.double() for tensor in tensors.values())
    found = torch.load(tmp_path / "o.pt")
    for name in ("embed_tokens.weight", "head.weight"):
        assert torch.equal(found[name], (weight.double() + (left @ right).T * 2).float())


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_lora_of_a_tied_head_is_the_embeddings(tmp_path: Path, *, is_saved: bool) -> None:
    """As PEFT adds it in place; it also saves the weight before, as of other embeddings."""
    folder, weight = tmp_path / "base", some(12, 6)
    folder.mkdir()
    save_base(folder / "model.safetensors", {"m.wte.weight": weight, "m.q.weight": some(5, 6)})
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    tensors = pair("lm_head", 12, 6) | pair("m.q", 5, 6)
    saved = {"lm_head.base_layer.weight": some(12, 6, seed=7)} if is_saved else {}
    adapter = save_adapter(tmp_path / "a", tensors | saved)
    code, said = run(tmp_path / "out", "--lora", adapter, "--onto", folder)
    assert code == 0, said
    assert "m.wte.weight is tied to the head: merged into both" in said
    before = saved.get("lm_head.base_layer.weight", weight).double()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"m.wte.weight", "m.q.weight"}
    wanted = (before + delta(tensors, "lm_head") * 2).float()
    assert torch.equal(found["m.wte.weight"], wanted)


@pytest.mark.parametrize("is_stored", [False, True])
def test_what_was_kept_tied_in_training_is_one_tensor(tmp_path: Path, *, is_stored: bool) -> None:
    """As PEFT saves it with ensure_weight_tying: twice, by both names."""
    folder, weight = tmp_path / "base", some(12, 6)
    folder.mkdir()
    base = {"embed_tokens.weight": weight, "q.weight": some(5, 6)}
    if is_stored:
        torch.save(base | {"lm_head.weight": weight}, folder / "pytorch_model.bin")
    else:
        save_base(folder / "model.safetensors", base)
        (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    names = ["embed_tokens", "lm_head"]
    trained = {f"{name}.weight": some(12, 6, seed=5) for name in names}
    adapter = save_adapter(tmp_path / "a", pair("q", 5, 6) | trained, modules_to_save=names)
    code, said = run(tmp_path / "o.pt", "--lora", adapter, "--onto", folder)
    assert code == 0, said
    assert "lm_head.weight of a has the bytes of the embedding: they stay one tensor" in said
    found = torch.load(tmp_path / "o.pt")
    assert found.keys() == base.keys() | ({"lm_head.weight"} if is_stored else set())
    for name in trained.keys() & found.keys():
        assert torch.equal(found[name], trained[name])


def test_a_model_may_lie_in_the_folder_of_its_adapter(tmp_path: Path) -> None:
    """As if the base had been saved into it, or a trainer's engine its state."""
    folder = save_adapter(tmp_path / "both", pair("q", 5, 6))
    base = {"q.weight": some(5, 6)}
    save_base(folder / "model.safetensors", base)
    (folder / "config.json").write_text("{}")
    (folder / "global_step3").mkdir()
    state = {"module": {"q.weight": some(5, 6)}}
    torch.save(state, folder / "global_step3" / "mp_rank_00_model_states.pt")
    found = merged(tmp_path / "out", folder, folder / "model.safetensors", "--to", "hf")
    wanted = (base["q.weight"].double() + delta(pair("q", 5, 6), "q") * 2).float()
    assert torch.equal(found["q.weight"], wanted)


def test_a_merged_model_is_no_adapter(tmp_path: Path) -> None:
    base = save_adapter(tmp_path / "base", {}, r=3)
    (base / "adapter_model.safetensors").unlink()
    save_base(base / "model.safetensors", {"q.weight": some(5, 6)})
    (base / "config.json").write_text("{}")
    merged(tmp_path / "out", save_adapter(tmp_path / "a", pair("q", 5, 6)), base)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize("has_config", [False, True])
def test_the_adapters_tokenizer_comes_without_its_config(
    tmp_path: Path, *, has_config: bool
) -> None:
    """transformers takes a folder with adapter_config.json for an adapter."""
    adapter, folder = save_adapter(tmp_path / "a", pair("q", 5, 6)), tmp_path / "base"
    (adapter / "tokenizer.json").write_text("{}")
    folder.mkdir()
    save_base(folder / "model.safetensors", {"q.weight": some(5, 6)})
    if has_config:
        (folder / "config.json").write_text("{}")
    words = ("--lora", adapter, "--onto", folder, "--hf-assets", adapter, "--to", "hf")
    code, said = run(tmp_path / "out", *words)
    assert code == 0, said
    files = {"model.safetensors", "tokenizer.json"} | ({"config.json"} if has_config else set())
    assert {file.name for file in (tmp_path / "out").iterdir()} == files
    assert "adapter_config.json of" in said
    assert "left out: the tensors are no adapter's" in said
    assert "an adapter: loading it" not in said


@pytest.mark.parametrize("change", ["none", "token", "jinja", "template"])
def test_another_tokenizer_of_the_adapter_is_noted(change: str, tmp_path: Path) -> None:
    """The result has the base's, and a training's tokens and template would be lost."""
    adapter, folder = save_adapter(tmp_path / "a", pair("q", 5, 6)), tmp_path / "base"
    folder.mkdir()
    save_base(folder / "model.safetensors", {"q.weight": some(5, 6)})
    (folder / "config.json").write_text("{}")
    tokenizer, template = {"model": {"vocab": {"a": 0}}}, {"chat_template": "chat"}
    for place in (folder, adapter):
        (place / "tokenizer.json").write_text(json.dumps(tokenizer, indent=len(place.name)))
        (place / "tokenizer_config.json").write_text(json.dumps(template))
    if change == "token":
        more = tokenizer | {"added_tokens": [{"id": 1, "content": "<x>"}]}
        (adapter / "tokenizer.json").write_text(json.dumps(more))
    elif change == "template":
        (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    elif change == "jinja":
        (adapter / "chat_template.jinja").write_text("x")
    code, said = run(tmp_path / "out", "--lora", adapter, "--onto", folder, "--dry-run")
    what = "other tokens" if change == "token" else "another chat template"
    assert code == 0, said
    assert (f"has {what} than" in said) == (change != "none"), said
    assert (f"--hf-assets {adapter} takes" in said) == (change != "none"), said


def test_a_new_head_is_added_and_said(tmp_path: Path) -> None:
    tensors = pair("q", 5, 6) | {"score.weight": some(2, 6)}
    adapter = save_adapter(tmp_path / "a", tensors, modules_to_save=["score"])
    base = save_base(tmp_path / "b.safetensors", {"q.weight": some(5, 6)})
    code, said = run(tmp_path / "o.safetensors", "--lora", adapter, "--onto", base)
    assert code == 0, said
    assert "1 tensor (score.weight) of modules_to_save that the base lacks" in said
    assert torch.equal(load_file(tmp_path / "o.safetensors")["score.weight"], some(2, 6))


def test_biases_that_peft_saves_twice_are_left_out(tmp_path: Path) -> None:
    """With ``bias="all"`` it saves those of a module to save by three names and reads one."""
    own = {"head.bias": some(3, seed=2), "score.dense.bias": some(3, seed=4)}
    base = save_base(tmp_path / "base.safetensors", {"q.weight": some(5, 6), **own})
    again = (
        *("head.modules_to_save.bias", "head.original_module.bias"),
        *("score.modules_to_save.default.dense.bias", "score.original_module.dense.bias"),
    )
    trained = {name: some(3, seed=9) for name in own}
    said = {"bias": "all", "modules_to_save": ["head", "score"]}
    parts = pair("q", 5, 6) | trained | {name: some(3) for name in again}
    adapter = save_adapter(tmp_path / "adapter", parts, **said)
    words = ("--lora", adapter, "--onto", base)
    code, told = run(tmp_path / "out.safetensors", *words)
    assert code == 0, told
    assert "which PEFT saves and never reads" in told
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {"q.weight", *own}
    assert all(torch.equal(found[name], trained[name]) for name in own)


def test_only_biases_are_left_out_and_only_if_all_were_saved(tmp_path: Path) -> None:
    """What a module of a model is called is up to it: PEFT's words alone prove nothing."""
    names = ("head.weight", "head.original_module.weight", "head.bias", "head.original_module.bias")
    before = {name: some(3) for name in names} | {"q.weight": some(5, 6)}
    trained = {name: some(3, seed=2) for name in names}
    base = save_base(tmp_path / "base.safetensors", before)
    parts = pair("q", 5, 6) | trained
    adapter = save_adapter(tmp_path / "adapter", parts, modules_to_save=["head"])
    code, told = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", base)
    assert code == 0, told
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], trained[name]) for name in names)


def test_a_bias_of_a_lora_is_added_to_the_one_that_was_trained(tmp_path: Path) -> None:
    base = {"q.weight": some(5, 6), "q.bias": some(5, seed=3)}
    more = {"q.base_layer.bias": some(5, seed=4), "q.lora_B.bias": some(5, seed=5)}
    adapter = save_adapter(tmp_path / "a", pair("q", 5, 6) | more, bias="all", lora_bias=True)
    found = merged(tmp_path / "o.safetensors", adapter, save_base(tmp_path / "b.safetensors", base))
    own, added = (tensor.double() for tensor in more.values())
    assert torch.equal(found["q.bias"], (own + added * 2).float())


def test_a_dry_run_groups_tensors_by_what_they_are(tmp_path: Path) -> None:
    folder = FIXTURES / "merged" / "plain"
    words = ("--lora", folder / "adapter", "--onto", folder / "ckpt", "--dry-run")
    code, said = run(tmp_path / "out", *words)
    assert code == 0, said
    assert "2 tensors = ckpt + 1.75 * (B A) of adapter model.layers.{0,1}" in said
    assert "13 tensors = ckpt" in said
    assert not (tmp_path / "out").exists()


def test_a_recipe_says_the_same(tmp_path: Path) -> None:
    folder = FIXTURES / "merged" / "dora"
    (tmp_path / "r.toml").write_text(f"lora = '{folder}/adapter'\nonto = '{folder}/ckpt'\n")
    code, said = run(tmp_path / "out", "--recipe", tmp_path / "r.toml")
    assert code == 0, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: bits(t) for n, t in found.items()} == Case("merged/dora").truth


def test_another_base_than_the_adapter_names_is_noted(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "a", pair("q", 5, 6), base_model_name_or_path="some/Model-7B")
    for name, is_noted in (("b", True), ("Model-7B", False)):
        base = save_base(tmp_path / f"{name}.safetensors", {"q.weight": some(5, 6)})
        code, said = run(tmp_path / f"{name}-o.safetensors", "--lora", adapter, "--onto", base)
        assert code == 0, said
        assert ("names some/Model-7B as its base" in said) == is_noted


@pytest.mark.parametrize(
    ("config", "is_noted"),
    [
        ({"target_modules": ["q"]}, True),
        ({"target_modules": ["0.q"]}, False),
        ({"target_modules": ".*q"}, False),
        ({"target_modules": ["q"], "layers_to_transform": [0]}, False),
        ({}, False),
    ],
)
def test_a_target_without_a_lora_is_noted(
    config: dict[str, Any], is_noted: bool, tmp_path: Path
) -> None:
    """PEFT loads an adapter that lost some of its LoRAs, with a warning, as if these were zeros."""
    tensors = {f"model.layers.{at}.{name}.weight": some(5, 6) for at in (0, 1) for name in "qk"}
    base = save_base(tmp_path / "base.safetensors", tensors)
    adapter = save_adapter(tmp_path / "adapter", pair("model.layers.0.q", 5, 6), **config)
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", base)
    assert code == 0, said
    note = "1 module that target_modules names without a LoRA: model.layers.1.q"
    assert (note in said) == is_noted


def test_what_is_not_finite_is_counted_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was beyond the range of its type is seen in wider numbers, of few at a time."""
    compute, largest = LowRank.__call__, []

    def measured(self: LowRank, gather: Gather, at: Computed, box: Box, dtype: DType) -> Any:
        largest.append(box.volume * dtype.itemsize)
        return compute(self, gather, at, box, dtype)

    monkeypatch.setattr(LowRank, "__call__", measured)
    weight = torch.full((2048, 2048), torch.nan, dtype=torch.bfloat16)
    base = save_base(tmp_path / "base.safetensors", {"model.q.weight": weight})
    adapter = save_adapter(tmp_path / "adapter", pair("model.q", 2048, 2048))
    ckptool.merge(tmp_path / "out.safetensors", lora=adapter, onto=base)
    assert max(largest) <= SPAN


@pytest.mark.parametrize(
    ("config", "is_noted"),
    [
        ({"rank_pattern": {"q": 4}, "alpha_pattern": {"model.q": 3}}, True),
        (
            {"rank_pattern": {"q": 4}, "alpha_pattern": {"model.q": 3}, "peft_version": "0.18"},
            False,
        ),
        ({"rank_pattern": {"q": 4}, "alpha_pattern": {"model.q": 8}}, False),
        ({"rank_pattern": {"k": 4}, "alpha_pattern": {"model.q": 3}}, False),
        ({"rank_pattern": {"q": 4}, "alpha_pattern": {"q": 3}}, False),
    ],
)
def test_a_scale_that_older_versions_have_otherwise_is_noted(
    config: dict[str, Any], is_noted: bool, tmp_path: Path
) -> None:
    """PEFT 0.13 scales by lora_alpha here, 0.14 by 3, and an old adapter does not say which."""
    base = save_base(tmp_path / "base.safetensors", {"model.q.weight": some(5, 6)})
    adapter = save_adapter(tmp_path / "adapter", pair("model.q", 5, 6), **config)
    code, said = run(tmp_path / "out.safetensors", "--lora", adapter, "--onto", base)
    assert code == 0, said
    assert ("model.q.weight: scaled as since PEFT 0.14" in said) == is_noted


def test_a_config_that_names_each_module_as_eva_does_is_not_tried_name_by_name() -> None:
    ranks = {f"layers.{n}.of.them": 4 for n in range(800)}
    settings, before = Settings("config", 8, 8, rank_pattern=ranks), _ending.cache_info()
    assert {settings.scale_of(name) for name in [*ranks][-3:]} == {2}
    assert _ending.cache_info() == before


def test_patterns_are_matched_as_by_peft() -> None:
    """Of any that fit, the first counts, whether it is a name or more; a dot is any character."""
    random = Random(7)
    for _ in range(300):
        patterns = ["".join(random.choices("ab.-", k=random.randint(1, 4))) for _ in range(6)]
        patterns += [f"({p})?{q}[ab]" for p, q in zip(patterns, "ab", strict=False)]
        random.shuffle(patterns)
        ranks = {pattern: number for number, pattern in enumerate(patterns)}
        settings = Settings("config", -1, 8, rank_pattern=ranks)
        for _ in range(20):
            key = "".join(random.choices("ab.\n-", [9, 9, 9, 1, 1], k=random.randint(0, 6)))
            fitting = (ranks[p] for p in ranks if re.match(rf"(.*\.)?({p})$", key))
            assert settings.rank_of(key) == next(fitting, -1), (key, patterns)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_values_that_are_no_numbers_are_noted(value: str, tmp_path: Path) -> None:
    tensors = pair("model.q", 5, 6) | pair("model.k", 5, 6)
    left = tensors["model.q.lora_B.weight"] = tensors["model.q.lora_B.weight"].clone()
    base = {f"model.{name}.weight": some(5, 6) for name in "qk"}
    onto = save_base(tmp_path / "base.safetensors", base)
    sound = save_adapter(tmp_path / "sound", tensors)
    code, said = run(tmp_path / "sound.safetensors", "--lora", sound, "--onto", onto)
    assert (code, "NaN" in said) == (0, False)
    left[3, 1] = float(value)
    odd = save_adapter(tmp_path / "odd", tensors)
    code, said = run(tmp_path / "odd.safetensors", "--lora", odd, "--onto", onto)
    assert code == 0
    assert "1 tensor of odd with NaN or infinite values, and so are the weights" in said
    assert f"first {value} at [3, 1]" in said
