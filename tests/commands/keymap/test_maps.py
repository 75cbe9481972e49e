"""Key maps at work on models and optimizers, and before or after resharding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, convert_to, flat, load_dcp, read_back
from keymap.mapped_models import HEADS, LLAMA, MEGATRON, all_bits, mapped, save, state
from torchtitan_states import CONFIGS, write_config

from ckptool.commands.keymap.library import builtin_maps
from ckptool.commands.options.rewrite import MapOptions, RewriteOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.errors import Damaged, Unsupported, UsageError

WEIGHT = "layers.0.feed_forward.w1.weight"


def optimizer(names: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What torchtitan saves for each parameter; query, key and value are one of them."""
    flat_state: dict[str, Any] = {}
    for at, (name, tensor) in enumerate(names.items()):
        flat_state[f"state.{name}.exp_avg"] = tensor + 0.5
        flat_state[f"state.{name}.step"] = torch.tensor(float(at))
        flat_state[f"param_groups.{name}.lr"] = 0.25 * at
    return flat_state


def fused(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters as the optimizer knows them: two groups of heads in one FusedQKVLinear."""
    found = {n: t for n, t in model.items() if "qkv_linear" not in n}
    for layer in range(2):
        head = f"layers.{layer}.attention.qkv_linear."
        q, k, v = (model[f"{head}w{x}.weight"] for x in "qkv")
        parts = [q.reshape(2, 2, 4, -1), k.reshape(2, 1, 4, -1), v.reshape(2, 1, 4, -1)]
        found[f"{head}wqkv.weight"] = torch.cat(parts, 1).reshape(32, -1)
    return found


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A torchtitan checkpoint of a model and its optimizer."""
    model = state()
    content = {f"optimizer.{n}": v for n, v in optimizer(fused(model)).items()}
    return save(tmp_path / "trained", model | content | {"train_state.step": 7})


@pytest.mark.parametrize("family", ["llama3", "llama3_tied"])
def test_meta_and_torchtitan_before_0_3_name_tensors_alike(family: str, out: Path) -> None:
    """And both permute the heads as the newer torchtitan does."""
    old = {
        n.replace("qkv_linear.", "").replace("lm_head", "output"): t
        for n, t in state(family).items()
    }
    source = save(out / "old", old)
    dims = MapOptions("meta-llama", HEADS)
    wanted = state(family, "hf")
    if "tied" in family:
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    assert mapped(source, out / "meta", dims) == all_bits(wanted)
    assert mapped(source, out / "titan", LLAMA) == all_bits(wanted)


def test_metas_permutation_is_the_published_one(out: Path) -> None:
    """transformers, convert_llama_weights_to_hf.py: view, transpose, reshape."""
    n_heads, dim1, dim2 = 4, 32, 6
    w = torch.arange(dim1 * dim2).reshape(dim1, dim2)
    wanted = w.view(n_heads, dim1 // n_heads // 2, 2, dim2).transpose(1, 2).reshape(dim1, dim2)
    source = save(out / "meta", {"layers.0.attention.wq.weight": w})
    options = MapOptions("meta-llama", {"head": 4}, inverse=False)
    done = mapped(source, out / "hf", options)
    assert done == {"model.layers.0.self_attn.q_proj.weight": bits(wanted)}
    back = mapped(out / "hf", out / "back", MapOptions("meta-llama", {"head": 4}))
    assert back == {"layers.0.attention.wq.weight": bits(w)}


def test_a_wrapped_model_stays_wrapped(out: Path) -> None:
    source = save(out / "a", {"model": state(), "ema": state()})
    hf = all_bits(state(side="hf"))
    wanted = {f"{head}.{name}": value for head in ("model", "ema") for name, value in hf.items()}
    assert mapped(source, out / "b") == wanted
    assert mapped(source, out / "c", select=("model.*",), model_only=True) == hf


def test_the_optimizer_follows_its_parameters(trained: Path, out: Path) -> None:
    found = mapped(trained, out / "hf")
    model = state(side="hf")
    assert {n: v for n, v in found.items() if not n.startswith("optimizer.")} == all_bits(model)
    moments = {f"optimizer.state.{n}.exp_avg": t + 0.5 for n, t in model.items()}
    assert {n: v for n, v in found.items() if n.endswith(".exp_avg")} == all_bits(moments)


def test_what_an_optimizer_keeps_once_a_parameter_goes_to_all_it_becomes(
    trained: Path, out: Path
) -> None:
    found = flat(load_dcp(trained)), (mapped(trained, out / "hf"), flat(load_dcp(out / "hf")))[1]
    old = "layers.1.attention.qkv_linear.wqkv.weight"
    for x in "qkv":
        name = f"optimizer.state.model.layers.1.self_attn.{x}_proj.weight.step"
        assert found[1][name] == found[0][f"optimizer.state.{old}.step"]
        rate = f"optimizer.param_groups.model.layers.1.self_attn.{x}_proj.weight.lr"
        assert load_dcp(out / "hf")[rate] == load_dcp(trained)[f"optimizer.param_groups.{old}.lr"]


def test_a_map_and_its_inverse_are_bit_equal(trained: Path, out: Path) -> None:
    mapped(trained, out / "hf")
    mapped(out / "hf", out / "back")
    assert all_bits(flat(load_dcp(out / "back"))) == all_bits(flat(load_dcp(trained)))
    keys = [key for key, value in load_dcp(trained).items() if not torch.is_tensor(value)]
    assert {k: load_dcp(out / "back")[k] for k in keys} == {k: load_dcp(trained)[k] for k in keys}


def test_steps_that_differ_cannot_become_one(out: Path) -> None:
    hf = state(side="hf")
    content = {f"optimizer.{n}": v for n, v in optimizer(hf).items() if "param_groups" not in n}
    with pytest.raises(Damaged, match="step"):
        mapped(save(out / "a", hf | content), out / "b")


def test_values_that_differ_cannot_become_one(out: Path) -> None:
    hf = state(side="hf")
    content = {f"optimizer.{n}": v for n, v in optimizer(hf).items() if not n.endswith(".step")}
    with pytest.raises(Unsupported, match=r"q_proj\.weight\.lr"):
        mapped(save(out / "a", hf | content), out / "b")


def groups(*lists: list[str]) -> dict[str, Any]:
    """Groups of parameters, as torch's get_optimizer_state_dict names them."""
    return {"optim": {"param_groups": [{"lr": 0.1, "params": names} for names in lists]}}


def test_groups_of_parameters_are_renamed(out: Path) -> None:
    fuse = "layers.0.attention.qkv_linear.wqkv.weight"
    moment = {f"optim.state.{n}.exp_avg": fused(state())[n] for n in (fuse, WEIGHT)}
    source = save(out / "a", state() | groups(["norm.weight", fuse], [WEIGHT]) | moment)
    mapped(source, out / "b")
    found = [group["params"] for group in load_dcp(out / "b")["optim"]["param_groups"]]
    heads = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    assert found == [["model.norm.weight", *heads], ["model.layers.0.mlp.gate_proj.weight"]]
    mapped(out / "b", out / "c")
    assert load_dcp(out / "c")["optim"]["param_groups"] == load_dcp(source)["optim"]["param_groups"]


@pytest.mark.parametrize(
    "lists",
    [
        [["norm.weight", "no.such.weight"]],
        [["norm.weight"], ["norm.weight"]],
    ],
)
def test_groups_that_cannot_be_renamed_are_refused(lists: list[list[str]], out: Path) -> None:
    source = save(out / "a", state() | groups(*lists))
    with pytest.raises(Unsupported, match=r"param_groups\.\d\.params"):
        mapped(source, out / "b")


def test_how_many_words_a_padded_vocabulary_has_must_be_said(out: Path) -> None:
    words = {"embedding.word_embeddings.weight": torch.arange(24.0).reshape(6, 4)}
    with pytest.raises(UsageError, match="size of vocab not found") as caught:
        mapped(save(out / "a", words), out / "b", MapOptions("megatron-gpt"))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("pass --dim vocab=N, or")
    assert caught.value.hint.endswith("vocab_size")


def test_moments_of_a_padded_vocabulary_are_refused_by_name(out: Path) -> None:
    moments = {f"optimizer.state.exp_avg.{n}": t for n, t in MEGATRON.items()}
    source = save(out / "a", MEGATRON | moments)
    unpadded = MapOptions("megatron-gpt", {"vocab": 5})
    with pytest.raises(Unsupported, match=r"exp_avg\.embedding\.word_embeddings") as caught:
        mapped(source, out / "b", unpadded)
    assert "unpad 6 to 5" in caught.value.message
    assert "final_layernorm" not in caught.value.message
    kept = mapped(source, out / "b", unpadded, drop=("*exp_avg.embedding*",))
    words = MEGATRON["embedding.word_embeddings.weight"]
    assert kept["model.embed_tokens.weight"] == bits(words[:5])
    full = mapped(source, out / "c", MapOptions("megatron-gpt", {"vocab": 6}))
    assert len(full) == 4


def test_state_that_is_not_named_after_a_parameter_is_refused_by_name(out: Path) -> None:
    source = save(out / "a", state() | {"optimizer.state.0.exp_avg": torch.zeros(3)})
    with pytest.raises(Unsupported, match=r"optimizer\.state\.0\.exp_avg"):
        mapped(source, out / "b")
    assert mapped(source, out / "b", model_only=True) == all_bits(state(side="hf"))


def test_tied_tensors_must_be_equal(tmp_path: Path, out: Path) -> None:
    (tmp_path / "assets").mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "assets" / "config.json").write_text(json.dumps(config))
    options = MapOptions("torchtitan-llama3", assets=tmp_path / "assets")
    whole = state("llama3_tied")
    found = mapped(save(out / "a", whole), out / "b", options)
    assert found == all_bits(state("llama3_tied", "hf"))
    whole["lm_head.weight"] = whole["lm_head.weight"] + 1
    with pytest.raises(Damaged, match=r"model\.embed_tokens\.weight"):
        mapped(save(out / "c", whole), out / "d", options)


def resharded(source: Path, target: Path, *, verify: bool = True, **options: Any) -> Path:
    run = TransferOptions(verify=verify, run=RunOptions(workers=2, fsync=False))
    rewriting = RewriteOptions(map=options.pop("map", MapOptions()))
    asked = ReshardOptions(rewrite=rewriting, transfer=run, **options)
    prepare_reshard(source, target, asked).run()
    return target


@pytest.mark.parametrize("policy", ["fsdp", "replicate"])
def test_to_reshard_and_to_map_may_be_done_in_either_order(
    policy: str, trained: Path, out: Path
) -> None:
    more: dict[str, Any] = {"mesh": parse_mesh("3"), "policy": policy}
    first = resharded(resharded(trained, out / "a", **more), out / "b", map=LLAMA, **more)
    mapped(trained, out / "c")
    second = resharded(out / "c", out / "d", **more)
    once = resharded(trained, out / "e", map=LLAMA, **more)
    tensors = [all_bits(flat(load_dcp(path))) for path in (out / "c", first, second, once)]
    assert all(found == tensors[0] for found in tensors[1:])


PAIRS = [
    (family, one.name)
    for family, config in CONFIGS.items()
    for one in builtin_maps().values()
    if config["model_type"] in one.model_types
    and not (one.name.startswith("megatron") and "qwen" in family)
    and one.name != "transformers-kimi-k2.5"  # torchtitan's small heads of images have no pairs
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_in_either_order_and_either_way_by_every_map(family: str, name: str, out: Path) -> None:
    """In five shards, which end amid heads, experts and layers."""
    sizes = {"extra": 0} if name.startswith("megatron") else {}
    sizes |= {"dim": 4} if name == "megatron-gpt" else {}
    options = MapOptions(name, sizes, assets=write_config(family, out / "assets"))
    shards: dict[str, Any] = {"mesh": parse_mesh("5"), "policy": "fsdp"}
    here = save(out / "hf", state(family, "hf"))
    for way in ("trainer", "back"):
        first = resharded(here, out / f"{way}-shards", verify=False, **shards)
        at_once = resharded(here, out / f"{way}-at-once", map=options, **shards)
        content = mapped(here, out / way, options)
        assert all_bits(flat(load_dcp(at_once))) == content
        convert_to("safetensors", first, out / f"{way}-first", map=options)
        assert read_back("safetensors", out / f"{way}-first") == content
        here = out / way
    assert content == all_bits(state(family, "hf"))


def test_shards_that_end_amid_a_head_are_permuted_as_well(trained: Path, out: Path) -> None:
    five = resharded(trained, out / "five", mesh=parse_mesh("5"), policy="fsdp")
    assert mapped(five, out / "hf") == mapped(trained, out / "whole")
