"""Which key map is taken, and the files that go along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import bits, convert_to, read_back
from keymap.mapped_models import HEADS, LLAMA, MEGATRON, all_bits, mapped, refusal, save, state

from ckptool.commands.keymap.choice import model_types
from ckptool.commands.keymap.library import builtin_maps, load_map, map_text
from ckptool.commands.options.rewrite import MapOptions


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


@pytest.mark.parametrize("own", [5, "llama", {"a": 1}, []])
def test_a_key_of_a_config_that_is_called_like_ours_says_nothing(own: object) -> None:
    record = {"model_type": "qwen2", "model_types": own}
    assert model_types([record]) == ["qwen2"]
