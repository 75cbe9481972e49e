"""What a trainer saves inside a checkpoint is part of the step, whatever it is read with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prune_runs import fates, pruned
from safetensors.torch import load_file, save_file

import ckptool

Place = Callable[[Path], Path]
PLACES: dict[str, Place] = {
    "a folder, as of diffusers": lambda step: step / "unet" / "diffusion_pytorch_model.safetensors",
    "an average": lambda step: step / "unet_ema" / "diffusion_pytorch_model.safetensors",
    "an adapter": lambda step: step / "pytorch_lora_weights.safetensors",
}


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"blocks.{n}.{k}.weight": torch.randn(16, 8) for n in range(4) for k in ("up", "to_q")}


def state_of_adam(step: int) -> dict[str, object]:
    one = {"step": torch.tensor(float(step)), "exp_avg": torch.randn(16, 8)}
    one["exp_avg_sq"] = torch.rand(16, 8) + 0.1
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [*range(8)]}]
    return {"state": {n: dict(one) for n in range(8)}, "param_groups": groups}


def save_step(run: Path, number: int, optimizer: object = None) -> Path:
    """What accelerate saves of a training whose hooks save the models themselves."""
    step = run / f"checkpoint-{number}"
    for place in PLACES.values():
        place(step).parent.mkdir(parents=True, exist_ok=True)
        save_file(weights(number), place(step))
        if place(step).parent != step:
            (place(step).parent / "config.json").write_text("{}")
    torch.save(state_of_adam(number) if optimizer is None else optimizer, step / "optimizer.bin")
    schedule = {"last_epoch": number, "_last_lr": [1e-3], "base_lrs": [1e-3]}
    torch.save(schedule, step / "scheduler.bin")
    torch.save(
        {"step": 0, "torch_manual_seed": torch.get_rng_state()}, step / "random_states_0.pkl"
    )
    return step


def set_nan(file: Path) -> None:
    state = load_file(file)
    state["blocks.1.up.weight"][3, 3] = torch.nan
    save_file(state, file)


def lose_one(file: Path) -> None:
    state = load_file(file)
    del state["blocks.1.up.weight"]
    save_file(state, file)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "NaN": (set_nan, "not-finite: blocks.1.up.weight"),
    "a tensor": (lose_one, "blocks.1.up.weight: missing, checkpoint-1 has it"),
    "bytes": (lambda file: file.write_bytes(file.read_bytes()[:-9]), "file-truncated"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_step_is_not_good_if_a_model_inside_is_not(
    damage: Callable[[Path], object], reason: str, place: Place, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        save_step(tmp_path, number)
    found = ckptool.verify_run(tmp_path).latest_good
    assert found is not None
    assert found.path.name == "checkpoint-3"
    damage(place(tmp_path / "checkpoint-3"))
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "checkpoint-2"
    (why,) = report.steps[0].reasons
    assert reason in why
    assert place(Path()).parent.name in why
    assert fates(pruned(tmp_path))["checkpoint-2"] == "keep"


@pytest.mark.parametrize(
    ("groups", "good"),
    [
        pytest.param({"lr": 1e-3, "betas": (0.9, 0.999)}, "checkpoint-2", id="emptied"),
        pytest.param({"lr": 1e-3, "momentum": 0}, "checkpoint-3", id="SGD from then on"),
    ],
)
def test_a_step_whose_optimizer_has_lost_all_state(
    groups: dict[str, object], good: str, tmp_path: Path
) -> None:
    for number in (1, 2):
        save_step(tmp_path, number)
    save_step(tmp_path, 3, {"state": {}, "param_groups": [{**groups, "params": [*range(8)]}]})
    for quick in (True, False):
        found = ckptool.verify_run(tmp_path, quick=quick).latest_good
        assert found is not None
        assert found.path.name == good


def test_sgd_keeps_no_state_in_any_step(tmp_path: Path) -> None:
    groups = [{"lr": 1e-3, "momentum": 0, "params": [*range(8)]}]
    for number in (1, 2):
        save_step(tmp_path, number, {"state": {}, "param_groups": groups})
    found = ckptool.verify_run(tmp_path).latest_good
    assert found is not None
    assert found.path.name == "checkpoint-2"
