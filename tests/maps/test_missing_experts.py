"""Experts that are missing, and those that are no experts of one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import convert_to, load_dcp
from expert_families import MOE, SMALL, made_of, packed
from safetensors.torch import load_file, save_file

from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Damaged, Unsupported, UsageError

transformers = pytest.importorskip("transformers")


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """A folder of Qwen3Moe with 3 experts in each of 2 layers."""
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3MoeConfig(**SMALL, **MOE)
    )
    made.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def without(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """Take tensors out of a model's file; return what is left."""
    file = folder / "model.safetensors"
    left = {n: t for n, t in load_file(file).items() if part not in n}
    save_file(left, file, {"format": "pt"})
    return left


LACKING = {
    ".experts.2.": r"num_(local_)?experts 3, but found 2 in model\.layers\.0\.mlp\.experts",
    ".experts.1.": r"model\.layers\.0\.mlp\.experts\.1\.\w+_proj\.weight not found",
    ".layers.1.": "num_hidden_layers 2, but found tensors of 1 layers",
}


@pytest.mark.parametrize("part", LACKING)
@pytest.mark.parametrize("wrapped", [False, True])
def test_experts_and_layers_that_are_missing_everywhere_are_missed(
    moe: Path, part: str, wrapped: bool, tmp_path: Path
) -> None:
    state = without(moe, part)
    source, options = moe, MapOptions(experts="packed")
    if wrapped:  # as a trainer saves it, with the config in the folder above
        dcp.save({"app": state}, checkpoint_id=moe / "step-1", no_dist=True)
        source = moe / "step-1"
    with pytest.raises(Unsupported, match=LACKING[part]):
        convert_to("dcp", source, tmp_path / "out", map=options)
    assert not (tmp_path / "out").exists()


def test_the_number_of_experts_is_reported_where_names_alone_tell_it(
    moe: Path, tmp_path: Path
) -> None:
    (moe / "config.json").unlink()
    report = convert_to("dcp", moe, tmp_path / "a", map=MapOptions(experts="packed"))
    assert "3 experts per layer, counted from the names: no config records how many" in report.notes
    options = MapOptions("transformers-experts", {"expert": 4})
    with pytest.raises(Unsupported, match=r"expert is 4 .* is .*experts\.2\..*: 1 are missing"):
        convert_to("dcp", moe, tmp_path / "b", map=options)


def test_packed_experts_are_as_many_as_config_says(moe: Path, tmp_path: Path) -> None:
    convert_to("dcp", moe, tmp_path / "packed", map=MapOptions(experts="packed"))
    config = (moe / "config.json").read_text()
    (moe / "config.json").write_text(config.replace('experts": 3', 'experts": 4'))
    options = MapOptions(experts="separate", assets=moe)
    with pytest.raises(Unsupported, match=r"experts 4, but found 3 in"):
        convert_to("dcp", tmp_path / "packed", tmp_path / "out", map=options)


def test_experts_of_several_types_are_never_one_tensor(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**SMALL, **MOE)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    state, odd = load_file(file), "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(state | {odd: state[odd].half()}, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=rf"is bfloat16, {odd} float16: they cannot be parts"):
        convert_to("hf", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="packed"))


def test_experts_with_their_inputs_first_are_refused(tmp_path: Path) -> None:
    """As the Hub's files of Qwen3-VL have them; transformers turns those that do not fit."""
    made = made_of("Qwen3VLMoe")
    made.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    state = {n: t.mT.contiguous() if ".experts." in n else t for n, t in load_file(file).items()}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=r"experts\.\w+: shape .* does not match"):
        convert_to("hf", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="separate"))


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    """Its config.json names a type that transformers has not."""
    made = made_of("DeepseekV3")
    made.save_pretrained(tmp_path / "hf")
    config = (tmp_path / "hf" / "config.json").read_text()
    (tmp_path / "hf" / "config.json").write_text(config.replace("deepseek_v3", "kimi_k2"))
    convert_to("dcp", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="packed"))
    assert {*load_dcp(tmp_path / "out")} == {*made.state_dict()}


def test_a_layers_last_expert_is_missed_where_layers_have_different_numbers(tmp_path: Path) -> None:
    """Each layer's router has a row for each of its own; no other number says it."""
    made_of("Dots3Note").save_pretrained(tmp_path / "hf")
    without(tmp_path / "hf", "vision_encoder.blocks.1.mlp.experts.4.")
    with pytest.raises(Unsupported, match=r"expert is (4|5) in .*, but (5|4) in .*missing"):
        convert_to("dcp", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="packed"))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (".1.mlp.experts.2.", r"gate\.weight is for 3 experts, but found 2 in model\.layers\.1"),
        (".experts.2.", r"gate\.weight is for 3 experts, but found 2 in model\.layers\.0"),
        (".1.mlp.experts.2.down_proj", "expert is 3 .*, but 2 in model.layers.1.*down_proj"),
        ("down_proj", r"model\.layers\.0\.mlp\.experts\.0\.down_proj not found"),
    ],
)
def test_experts_that_are_missing_are_missed_without_a_config(
    part: str, words: str, moe: Path, tmp_path: Path
) -> None:
    without(moe, part)
    (moe / "config.json").unlink()
    with pytest.raises(Unsupported, match=words):
        convert_to("dcp", moe, tmp_path / "out", map=MapOptions("transformers-experts"))
    convert_to(
        "dcp",
        moe,
        tmp_path / "out",
        map=MapOptions("transformers-experts"),
        select=("*.layers.0.*",),
    )


def test_packed_experts_without_half_of_them_are_missed(moe: Path, tmp_path: Path) -> None:
    """With a config, too: no number in it says so."""
    options: dict[str, Any] = {"drop": ("*.1.mlp.experts.down_proj",)}
    convert_to("dcp", packed(moe), tmp_path / "half", **options)
    again = MapOptions(experts="separate", assets=moe)
    with pytest.raises(Unsupported, match=r"layers\.1\.mlp\.experts\.0\.down_proj not found"):
        convert_to("hf", tmp_path / "half", tmp_path / "out", map=again)


def test_a_name_that_no_map_of_experts_takes_is_named(moe: Path, tmp_path: Path) -> None:
    file = moe / "model.safetensors"
    state = load_file(file) | {"model.layers.0.mlp.experts.extra": torch.ones(2)}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UsageError, match=r"all but 1:\n.*mlp\.experts\.extra"):
        convert_to("hf", moe, tmp_path / "out", map=MapOptions(experts="packed"))


def test_experts_that_took_different_steps_are_never_one_tensor(moe: Path, tmp_path: Path) -> None:
    state = load_file(moe / "model.safetensors")
    steps = {f"optimizer.state.{name}.step": torch.tensor(7.0) for name in state}
    steps["optimizer.state.model.layers.0.mlp.experts.1.up_proj.weight.step"] += 1
    dcp.save(state | steps, checkpoint_id=moe / "run", no_dist=True)
    words = r"experts\.gate_up_proj\.step .*: the tensors that it is made of hold different values"
    with pytest.raises(Damaged, match=words):
        convert_to("dcp", moe / "run", tmp_path / "out", map=MapOptions(experts="packed"))
