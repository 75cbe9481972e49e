"""The output for DeepSpeed's ``load_universal``, as DeepSpeed reads it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import bits, case, convert_to, load_torch, read_back

from ckptool.commands.open import open_checkpoint
from ckptool.errors import Problem, Unsupported
from ckptool.formats.deepspeed import write

STATES = ("fp32", "exp_avg", "exp_avg_sq")


def universal_of(name: str, out: Path) -> Path:
    convert_to("deepspeed-universal", case(name).path, out / "u")
    return out / "u" / (out / "u" / "latest_universal").read_text()


def load_with_scaler(path: Path) -> Any:
    """As DeepSpeed loads it, with a stand-in for its loss scaler."""
    from torch.serialization import safe_globals

    scaler = type("LossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
    with safe_globals([scaler]):
        return load_torch(path)


@pytest.mark.parametrize("name", ["deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_universal"])
def test_each_parameter_has_a_folder_with_its_states(name: str, out: Path) -> None:
    folder, truth = universal_of(name, out), case(name).truth
    parameters = {n.removeprefix("exp_avg.") for n in truth if n.startswith("exp_avg.")}
    for parameter in parameters:
        for state in STATES:
            saved = load_torch(folder / "zero" / parameter / f"{state}.pt")
            assert saved["cat_dim"] == 0
            assert bits(saved["param"]) == truth[f"{state}.{parameter}"]
        assert load_torch(folder / "zero" / parameter / "step.pt") == 1.0


@pytest.mark.parametrize("name", ["deepspeed_zero_2", "deepspeed_zero_3"])
def test_every_zero_stage_finds_its_model_file_and_optimizer_state(name: str, out: Path) -> None:
    folder = universal_of(name, out)
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = load_torch(folder / file)
        assert (model["global_steps"], model["mp_world_size"], model["epoch"]) == (1, 1, 4)
        assert model["lr_scheduler"] is None
    optimizer = load_with_scaler(folder / "zero" / "optimizer_state.pt")
    assert type(optimizer["loss_scaler"]).__name__ == "LossScaler"
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
    inner = optimizer["optimizer_state_dict"]
    assert inner["param_groups"] == optimizer["param_groups"]
    assert inner["state"][0]["step"] == 1.0


@pytest.mark.parametrize("name", ["deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_universal"])
def test_nothing_is_lost_on_the_way(name: str, out: Path) -> None:
    convert_to("deepspeed-universal", case(name).path, out / "u")
    convert_to("torch-save", out / "u", out / "m.pt")
    assert read_back("torch-save", out / "m.pt") == case(name).truth


@pytest.mark.parametrize(
    ("source", "bare"), [("deepspeed_zero_3", True), ("deepspeed_zero_2", False)]
)
def test_zero_3_finds_vectors_where_its_version_loads_no_others(
    source: str, bare: bool, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed up to 0.19.0 takes a file's ``.view(-1)`` at ZeRO 3, and its ``["param"]`` else."""
    monkeypatch.setattr(write, "_LOADS_BOTH", (9, 0, 0))
    report = convert_to("deepspeed-universal", case(source).path, out / "u")
    states = [load_torch(path) for path in (out / "u").glob("*/zero/*/exp_avg.pt")]
    assert {getattr(saved, "ndim", None) for saved in states} == {1 if bare else None}
    assert any("written for ZeRO 3" in note for note in report.notes) == bare
    convert_to("torch-save", out / "u", out / "m.pt")
    assert read_back("torch-save", out / "m.pt") == case(source).truth


def test_a_vocabulary_loses_its_padding_and_layers_keep_how_they_are_cut(out: Path) -> None:
    report = convert_to("deepspeed-universal", case("deepspeed_pipeline").path, out / "u")
    folder = out / "u" / "global_step1_universal" / "zero"
    assert "rows 7 to 8 pad the vocabulary" in " ".join(report.notes)
    embedding = load_torch(folder / "tied_modules.embed.weight" / "fp32.pt")
    assert (embedding["vocab_tensor"], tuple(embedding["param"].shape)) == (True, (7, 6))
    assert load_torch(folder / "2.weight" / "fp32.pt")["cat_dim"] == 1
    assert "cat_dim" not in load_torch(folder / "2.bias" / "fp32.pt")


def test_any_weights_can_become_masters(out: Path) -> None:
    """The names are all it takes."""
    one = case("hf_shards")
    convert_to("deepspeed-universal", one.path, out / "u", rename=("^=fp32.",))
    found = open_checkpoint(out / "u").catalog
    assert found.format == "deepspeed-universal"
    assert set(found.tensors) == {f"fp32.{name}" for name in one.truth}


def test_other_names_have_no_place(out: Path) -> None:
    with pytest.raises(Unsupported, match=r"fp32\.<parameter>"):
        convert_to("deepspeed-universal", case("safetensors_file").path, out / "u")
    assert not list(out.iterdir())


def test_a_stray_file_of_one_parameter_is_not_a_state(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("deepspeed_universal")
    before = open_checkpoint(folder).catalog.tensors.keys()
    state = min(folder.rglob("exp_avg.pt"))
    shutil.copy(state, state.with_name("exp_avg_backup.pt"))
    catalog = open_checkpoint(folder).catalog
    assert catalog.tensors.keys() == before
    told = [n.file for n in catalog.notes if isinstance(n, Problem) and n.code == "file-unused"]
    assert [Path(file or "").name for file in told] == ["exp_avg_backup.pt"]


def test_a_state_that_several_parameters_have_is_read(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("deepspeed_universal")
    for state in sorted(folder.rglob("exp_avg.pt"))[:2]:
        shutil.copy(state, state.with_name("slow_average.pt"))
    names = open_checkpoint(folder).catalog.tensors
    assert sum(name.startswith("slow_average.") for name in names) == 2
