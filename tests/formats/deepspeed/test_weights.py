"""DeepSpeed's checkpoints without frozen parameters: never exported as if complete."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, case, convert_to, read_back

import ckptool
from ckptool.commands.inspect.report import inspect
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.verify.verify import verify
from ckptool.core.sharding.placement import parse_mesh
from ckptool.errors import Problem, Unsupported
from ckptool.formats.deepspeed.weights import EXCLUDED, UNRECORDED

EXCLUDED_BY_DEEPSPEED = "deepspeed_frozen_excluded"
Copy = Callable[[str], Path]


def codes(path: Path) -> set[str]:
    return {one.code for one in verify(path, VerifyOptions(workers=1)).findings}


def test_frozen_parameters_that_were_excluded_are_missed(out: Path) -> None:
    one = case(EXCLUDED_BY_DEEPSPEED)
    with pytest.raises(Unsupported, match=r"without its frozen parameters.*fixed") as caught:
        convert_to("safetensors", one.path, out / "m")
    assert "--drop frozen" in str(caught.value.hint)
    with pytest.raises(Unsupported, match="without its frozen parameters"):
        prepare_reshard(one.path, out / "m", ReshardOptions(parse_mesh("2")))
    assert not list(out.iterdir())
    assert EXCLUDED in codes(one.path)
    assert not verify(one.path, VerifyOptions(strict=True, workers=1)).ok


def test_inspect_warns_of_them_as_verify_does() -> None:
    report = inspect(case(EXCLUDED_BY_DEEPSPEED).path)
    assert report.ok
    assert "without its frozen parameters" in report.notes[0]


def test_what_is_there_is_written_where_that_is_reported(out: Path) -> None:
    one = case(EXCLUDED_BY_DEEPSPEED)
    report = convert_to("safetensors", one.path, out / "m", drop=("frozen",))
    assert read_back("safetensors", out / "m") == one.truth
    assert any("frozen parameters" in note for note in report.notes)
    convert_to("safetensors", one.path, out / "some", select=("module.first.*",))
    assert sorted(read_back("safetensors", out / "some")) == [
        "module.first.bias",
        "module.first.weight",
    ]


def test_load_says_why_they_are_not_there() -> None:
    path = case(EXCLUDED_BY_DEEPSPEED).path
    tensors = ckptool.open(path, model_only=True).tensors
    state = {
        n: torch.zeros(e.shape, dtype=getattr(torch, e.dtype.name)) for n, e in tensors.items()
    }
    with pytest.raises(ckptool.CkptoolError, match="saved without its frozen parameters"):
        ckptool.load(path, state, model_only=True)
    ckptool.load(path, state, model_only=True, drop=["frozen"])
    assert bits(state["first.weight"]) == case(EXCLUDED_BY_DEEPSPEED).truth["module.first.weight"]


@pytest.mark.parametrize("name", ["deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_universal"])
def test_a_whole_checkpoint_is_whole(name: str) -> None:
    assert not codes(case(name).path) & {EXCLUDED, UNRECORDED}


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with changed model files."""
    for file in folder.rglob("*model_states.pt"):
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)
    return folder


def exclude(state: dict[str, Any]) -> None:
    state["frozen_param_shapes"] = state["frozen_param_fragments"] = None
    state["module"].pop("fixed.weight", None)


@pytest.mark.parametrize("name", ["deepspeed_zero_3", "deepspeed_universal"])
def test_every_kind_of_checkpoint_says_so(name: str, copy_of: Copy, out: Path) -> None:
    def as_zero_2(state: dict[str, Any]) -> None:
        exclude(state)
        if name == "deepspeed_universal":
            state["ds_config"]["zero_optimization"]["stage"] = 2

    folder = changed(copy_of(name), as_zero_2)
    assert EXCLUDED in codes(folder)
    with pytest.raises(Unsupported, match="without its frozen parameters"):
        convert_to("torch-save", folder, out / "m.pt")


def below_zero_2(folder: Path, *bare: str) -> Path:
    """A model file as of ZeRO 0, with these modules beside those that have tensors."""
    held: Any = OrderedDict({n: torch.zeros(2) for n in ("first.weight", "layers.2.up.weight")})
    modules = [*{part for name in held for part in parents(name)}, *bare]
    held._metadata = OrderedDict((one, {"version": 1}) for one in modules)
    state = {"module": held, "frozen_param_shapes": None, "frozen_param_fragments": None}
    folder.mkdir()
    torch.save(
        {**state, "buffer_names": [], "ds_config": {}}, folder / "mp_rank_00_model_states.pt"
    )
    return folder


def parents(name: str) -> list[str]:
    steps = name.split(".")
    return [".".join(steps[:count]) for count in range(len(steps))]


@pytest.mark.parametrize(
    ("bare", "code"),
    [
        pytest.param(("first.base_layer", "first.lora_A"), EXCLUDED, id="what PEFT wraps"),
        pytest.param(("layers.0.up", "layers.1.up"), EXCLUDED, id="modules like one with tensors"),
        pytest.param(("encoder", "layers.0.act_fn"), UNRECORDED, id="perhaps without parameters"),
        pytest.param(("layers.0.act_fn", "dropout"), None, id="without parameters"),
        pytest.param((), None, id="none"),
    ],
)
def test_below_zero_2_only_modules_show_it(
    bare: tuple[str, ...], code: str | None, tmp_path: Path
) -> None:
    folder = below_zero_2(tmp_path / "step", *bare)
    notes = open_checkpoint(folder).catalog.notes
    found = {note.code: note for note in notes if isinstance(note, Problem)}
    assert list(found) == ([code] if code else [])
    assert all(bare[0] in note for note in found.values())


def test_layers_of_a_pipeline_that_lack_what_others_have(copy_of: Copy) -> None:
    folder = copy_of("deepspeed_pipeline")
    assert not codes(folder) & {EXCLUDED, UNRECORDED}
    for file in folder.rglob("layer_01-*"):
        torch.save({}, file)
    notes = open_checkpoint(folder).catalog.notes
    assert any(isinstance(note, Problem) and note.code == UNRECORDED for note in notes)
