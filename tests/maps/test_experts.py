"""Experts that transformers packs in memory, separated as in files and packed again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, convert_to, flat, load_dcp, read_back
from expert_families import (
    FAMILIES,
    HUB,
    MOE,
    MOMENTS,
    OF_THEIR_OWN,
    PARTS,
    SMALL,
    WITH_VISION,
    Saved,
    made_of,
    on_the_hub,
)
from safetensors.torch import load_file

from ckptool.commands.keymap.choice import PACKED
from ckptool.commands.keymap.library import builtin_maps
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported, UsageError

transformers = pytest.importorskip("transformers")


@pytest.fixture(
    params=[
        family
        for family in (*FAMILIES, *WITH_VISION, "Qwen3OmniMoe", *PARTS)
        if family not in OF_THEIR_OWN
    ]
)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    """A DCP folder of a model and moments of its experts, those, and what its files hold."""
    made = made_of(request.param)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    made.save_pretrained(tmp_path / "hf")
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    experts = ((n, t) for n, t in made.named_parameters() if ".experts." in n)
    moments = {n.join(MOMENTS): t.detach() + 1 for n, t in experts}
    dcp.save(state := state | moments, checkpoint_id=tmp_path / "dcp", no_dist=True)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    saved = {n: t for file in files for n, t in load_file(file).items()}
    return tmp_path, state, {on_the_hub(request.param, n): t for n, t in saved.items()}


def test_files_are_those_of_transformers_and_back(model: Saved) -> None:
    """Moments go with their experts."""
    folder, state, files = model
    options = MapOptions("auto", assets=folder / "hf")
    report = convert_to("dcp", folder / "dcp", folder / "out", map=options)
    assert any("detected from names and config.json" in note for note in report.notes)
    written = flat(load_dcp(folder / "out"))
    moments = {n: t for n, t in written.items() if n.startswith(MOMENTS[0])}
    weights = {n: bits(t) for n, t in written.items() if n not in moments}
    assert weights == {name: bits(tensor) for name, tensor in files.items()}
    assert any(".experts.1." in name for name in moments)
    for name, tensor in moments.items():
        weight = files[name.removeprefix(MOMENTS[0]).removesuffix(MOMENTS[1])]
        assert torch.equal(tensor, weight + 1)
    convert_to("dcp", folder / "out", folder / "back", map=MapOptions(experts="packed"))
    again = flat(load_dcp(folder / "back"))
    assert {n: bits(t) for n, t in again.items()} == {n: bits(t) for n, t in state.items()}


WITHIN = {
    "Dots3NoteTextModel": "dots3_note_text",
    "UnlimitedOcrTextModel": "unlimited_ocr",
    "dots3_note_vision_encoder": "dots3_note",
    "mistral_large4_text": "mistral_large4",
    "qwen3_omni_moe_text": "qwen3_omni_moe",
}
"""What transformers has steps of its own for, as a part of a model that has a map."""


def test_every_family_whose_experts_transformers_packs_has_a_map() -> None:
    """A newer transformers that packs more fails here, and names them (see pyproject.toml)."""
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    families = _build_checkpoint_conversion_mapping().items()
    packed = {
        name
        for name, steps in families
        if any("experts.*." in source for step in steps for source in step.source_patterns)
    }
    maps = [each for each in builtin_maps().values() if each.source == PACKED]
    known = {kind for each in maps for kind in each.model_types}
    assert packed - known == {*WITHIN}
    assert known >= {*WITHIN.values()}


@pytest.mark.parametrize("family", HUB)
def test_the_hubs_names_are_written_and_those_of_save_pretrained_read(
    family: str, tmp_path: Path
) -> None:
    """Transformers loads both; what other programs load is on the Hub."""
    made = made_of(family)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    made.save_pretrained(tmp_path / "saved")
    convert_to("dcp", tmp_path / "saved", tmp_path / "packed", map=MapOptions(experts="packed"))
    state = {name: bits(tensor) for name, tensor in made.state_dict().items()}
    assert {n: bits(t) for n, t in flat(load_dcp(tmp_path / "packed")).items()} == state
    options = MapOptions(experts="separate", assets=tmp_path / "saved")
    convert_to("hf", tmp_path / "packed", tmp_path / "hub", map=options)
    assert {*load_file(tmp_path / "hub" / "model.safetensors")} == {
        on_the_hub(family, n) for n in load_file(tmp_path / "saved" / "model.safetensors")
    }
    loaded, info = type(made).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info.values())
    assert {name: bits(tensor) for name, tensor in loaded.state_dict().items()} == state


@pytest.mark.parametrize("family", OF_THEIR_OWN)
def test_experts_that_files_hold_packed_stay_so_unless_asked(family: str, tmp_path: Path) -> None:
    """As they are separate neither in memory nor in files, no model would load them."""
    made = made_of(family)
    made.save_pretrained(tmp_path / "hf")
    dcp.save(made.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = MapOptions("auto", assets=tmp_path / "hf")
    with pytest.raises(UsageError, match=r"--map auto: (no built-in map|\d maps|the names)"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=options)


def test_a_models_folder_gets_no_names_of_a_trainer_by_chance(tmp_path: Path) -> None:
    """What a trainer saved under Hugging Face's names needs no map."""
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma3TextConfig(**SMALL, pad_token_id=0)
    )
    made.save_pretrained(tmp_path / "hf")
    dcp.save(made.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = MapOptions("auto", assets=tmp_path / "hf")
    with pytest.raises(UsageError, match="megatron-gemma would make Megatron's of them"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=options)
    with pytest.raises(UsageError, match="no tensor of the model has `experts"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=MapOptions(experts="separate"))


def test_granite_has_other_names_in_memory(tmp_path: Path) -> None:
    config = transformers.GraniteMoeConfig(**SMALL, num_local_experts=3)
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "hf")
    dcp.save(made.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = MapOptions("auto", assets=tmp_path / "hf")
    convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=options)
    assert read_back("safetensors", tmp_path / "out") == read_back("safetensors", tmp_path / "hf")
    with pytest.raises(UsageError, match="no built-in map matches all model tensors"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "a", map=MapOptions(experts="separate"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (MapOptions(experts="separate"), "the experts are already separate"),
        (MapOptions("auto", experts="packed"), "cannot be combined"),
        (MapOptions(experts="apart"), "not packed or separate"),
    ],
)
def test_what_experts_cannot_be(options: MapOptions, words: str, tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**SMALL, **MOE)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(UsageError, match=words):
        convert_to("hf", tmp_path / "hf", tmp_path / "out", map=options)


def test_another_way_to_pack_is_refused(tmp_path: Path) -> None:
    """gpt-oss has its columns interleaved, and biases."""
    packed = {"gate_up_proj": (3, 16, 24), "gate_up_proj_bias": (3, 24), "down_proj": (3, 12, 16)}
    state = {f"model.layers.0.mlp.experts.{n}": torch.ones(s) for n, s in packed.items()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UsageError, match="gate_up_proj_bias"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "a", map=MapOptions("transformers-experts"))
    del state["model.layers.0.mlp.experts.gate_up_proj_bias"]
    dcp.save(state, checkpoint_id=tmp_path / "unbiased", no_dist=True)
    (tmp_path / "unbiased" / "config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(Unsupported, match="does not match"):
        convert_to(
            "hf", tmp_path / "unbiased", tmp_path / "b", map=MapOptions("transformers-experts")
        )
