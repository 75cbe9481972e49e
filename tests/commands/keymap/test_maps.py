"""Key maps at work: chosen, applied to models and optimizers, refused if they do not match."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Bits, bits, convert_to, flat, load_dcp, read_back
from torchtitan_states import CONFIGS, recorded, write_config

import ckptool
from ckptool.commands.keymap.library import builtin_maps, load_map, map_text
from ckptool.commands.options.rewrite import MapOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.run_options import RunOptions
from ckptool.errors import CkptoolError, Damaged, Unsupported, UsageError

HEADS = {"head": 4, "kv": 2}
LLAMA = MapOptions("torchtitan-llama3", HEADS)
WEIGHT = "layers.0.feed_forward.w1.weight"


def state(family: str = "llama3", side: str = "trainer") -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(a).float() for n, a in sorted(recorded(family)[side].items())}


def save(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


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


def mapped(source: Path, target: Path, options: MapOptions = LLAMA, **more: Any) -> dict[str, Bits]:
    convert_to(more.pop("to", "dcp"), source, target, map=options, **more)
    return {name: bits(tensor) for name, tensor in flat(load_dcp(target)).items()}


def all_bits(tensors: dict[str, torch.Tensor]) -> dict[str, Bits]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


# Models


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


# Optimizers


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


MEGATRON = {
    "embedding.word_embeddings.weight": torch.arange(24.0).reshape(6, 4),
    "decoder.final_layernorm.weight": torch.arange(4.0),
}


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


# Resharding


def resharded(source: Path, target: Path, *, verify: bool = True, **options: Any) -> Path:
    run = TransferOptions(verify=verify, run=RunOptions(workers=2, fsync=False))
    prepare_reshard(source, target, ReshardOptions(transfer=run, **options)).run()
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
        contents = [
            mapped(here, out / way, options),
            mapped(first, out / f"{way}-first", options),
            all_bits(flat(load_dcp(at_once))),
        ]
        assert contents[1:] == contents[:1] * 2
        here = out / way
    assert contents[0] == all_bits(state(family, "hf"))


def test_shards_that_end_amid_a_head_are_permuted_as_well(trained: Path, out: Path) -> None:
    five = resharded(trained, out / "five", mesh=parse_mesh("5"), policy="fsdp")
    assert mapped(five, out / "hf") == mapped(trained, out / "whole")


# What does not fit


def refusal(what: Any, *arguments: Any, **options: Any) -> CkptoolError:
    with pytest.raises(CkptoolError) as caught:
        what(*arguments, **options)
    return caught.value


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


# Which map


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama3", "torchtitan-llama3"),
        ("qwen3", "torchtitan-qwen3"),
        ("qwen3_moe", "torchtitan-qwen3"),
        ("deepseek_v3", "torchtitan-deepseek-v3"),
    ],
)
def test_auto_finds_the_map_by_the_names_alone(family: str, name: str, out: Path) -> None:
    source = save(out / "a", state(family))
    dims = HEADS if family == "llama3" else {}
    report = convert_to("dcp", source, out / "b", map=MapOptions("auto", dims))
    assert report.map is not None
    assert (report.map.name, report.map.target) == (name, "Hugging Face")
    assert any(f"map {name}, torchtitan to Hugging Face" in note for note in report.notes)


def test_auto_does_not_choose_among_several(out: Path) -> None:
    error = refusal(mapped, save(out / "a", state(side="hf")), out / "b", MapOptions("auto", HEADS))
    assert "meta-llama (Hugging Face to Meta)" in error.message
    assert "torchtitan-llama3 (Hugging Face to torchtitan)" in error.message


def test_auto_says_where_no_map_fits(out: Path) -> None:
    source = save(out / "a", {"fc.weight": torch.zeros(2)})
    assert (
        "matches any model tensor" in refusal(mapped, source, out / "b", MapOptions("auto")).message
    )


def test_auto_says_what_the_nearest_map_does_not_take(out: Path) -> None:
    odd = {"decoder.final_layernorm.bias": torch.zeros(4)}
    error = refusal(mapped, save(out / "a", MEGATRON | odd), out / "b", MapOptions("auto"))
    assert "all but 1:\n  - decoder.final_layernorm.bias" in error.message


def test_experts_of_a_model_that_only_config_json_tells_say_so(out: Path) -> None:
    names = ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
    state = {f"model.layers.0.mlp.{name}": torch.zeros(2, 4, 6) for name in names}
    state["model.layers.0.moe.x"] = torch.zeros(2)
    error = refusal(mapped, save(out / "a", state), out / "b", MapOptions(experts="separate"))
    assert "all but 1:" in error.message
    del state["model.layers.0.moe.x"]
    state["model.layers.0.post_self_attn_layernorm.weight"] = torch.zeros(2)
    error = refusal(mapped, save(out / "c", state), out / "b", MapOptions(experts="separate"))
    assert "transformers-kolibri1 matches all names, but no config.json says" in error.message


def test_a_megatron_model_that_is_wrapped_twice(out: Path) -> None:
    wrapped = {f"model.module.module.{n}": t for n, t in MEGATRON.items()}
    moments = {f"optimizer.state.module.module.{n}.exp_avg": t for n, t in MEGATRON.items()}
    found = mapped(save(out / "a", wrapped | moments), out / "b", MapOptions("auto", {"vocab": 6}))
    names = ("model.embed_tokens.weight", "model.norm.weight")
    assert found.keys() == {
        *(f"model.module.module.{name}" for name in names),
        *(f"optimizer.state.module.module.{name}.exp_avg" for name in names),
    }


@pytest.mark.parametrize("name", ["lama", "missing.toml"])
def test_a_map_that_is_not_there(name: str) -> None:
    assert name in refusal(load_map, name).message


def test_a_map_of_ones_own(out: Path) -> None:
    text = """
        [dims]
        head = ["num_attention_heads"]

        [[rule]]
        from = "blocks [block (head dim) wide]"
        to = "block.{block}.head.{head}.w [dim wide]"
    """
    (out / "m.toml").write_text(text)
    values = torch.arange(2 * 6 * 4.0).reshape(2, 6, 4)
    options = MapOptions(str(out / "m.toml"), {"head": 3})
    found = mapped(save(out / "a", {"blocks": values}), out / "b", options)
    assert found == {
        f"block.{b}.head.{h}.w": bits(values[b, 2 * h : 2 * h + 2])
        for b in range(2)
        for h in range(3)
    }
    assert mapped(out / "b", out / "c", options) == {"blocks": bits(values)}


@pytest.mark.parametrize("name", sorted(builtin_maps()))
def test_a_built_in_map_printed_and_given_as_a_file_is_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(map_text(name))
    assert load_map(str(tmp_path / "m.toml")) == builtin_maps()[name]


# Files that go along


def test_assets_go_along_and_tell_the_dims(out: Path) -> None:
    assets = out / "assets"
    assets.mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (assets / "config.json").write_text(json.dumps(config))
    (assets / "tokenizer.json").write_text("{}")
    (assets / "model.safetensors").write_bytes(b"not to be copied")
    source = save(out / "a", state())
    options = MapOptions("torchtitan-llama3", assets=assets)
    convert_to("safetensors", source, out / "hf", map=options)
    assert {path.name for path in (out / "hf").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert json.loads((out / "hf" / "config.json").read_text()) == config
    assert read_back("safetensors", out / "hf") == all_bits(state(side="hf"))


def test_assets_need_a_folder(out: Path) -> None:
    source = save(out / "a", state())
    gone = MapOptions(LLAMA.name, HEADS, assets=out / "none")
    assert "no such folder" in refusal(mapped, source, out / "b", gone).message
    (out / "assets").mkdir()
    empty = MapOptions(LLAMA.name, HEADS, assets=out / "assets")
    assert "no config.json" in refusal(mapped, source, out / "b", empty).message
    (out / "assets" / "config.json").write_text("{}")
    error = refusal(mapped, source, out / "b.pt", empty, to="torch-save")
    assert "single file" in error.message


def test_the_report_says_what_became_of_each_tensor(out: Path) -> None:
    report = convert_to("dcp", save(out / "a", state()), out / "b", map=LLAMA)
    assert report.map is not None
    moves = {move.target: move for move in report.map.moves}
    query = moves["model.layers.1.self_attn.q_proj.weight"]
    assert query.sources == ("layers.1.attention.qkv_linear.wq.weight",)
    assert (query.operation, query.entry.shape) == ("permute", (16, 16))
    assert moves["model.norm.weight"].operation == "rename"


def test_experts_that_lie_the_other_way_are_not_taken_for_the_usual_ones(out: Path) -> None:
    """As torchtitan had them in its first months: rows of hidden features."""
    turned = {
        n: t.transpose(1, 2).contiguous() if "inner_experts" in n else t
        for n, t in state("qwen3_moe").items()
    }
    error = refusal(mapped, save(out / "a", turned), out / "b", MapOptions("torchtitan-qwen3"))
    assert "hidden is" in error.message


# Models that are nearly those of a map


def assets(folder: Path, model_type: str, **more: Any) -> Path:
    folder.mkdir()
    config = {"model_type": model_type, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


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


FUNCTIONS = {
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
