"""Steps of which some weights are of another step, of another layer, or of another model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prune_runs import fates, pruned
from safetensors.torch import load_file, save_file
from torch.optim import SGD, AdamW

import ckptool
from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.verify.history import saves

UP, DOWN = "layers.1.up.weight", "layers.2.up.weight"
Weights = dict[str, torch.Tensor]


def begin(seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """Make the weights of a model of four layers; one of them is never trained."""
    torch.manual_seed(seed)
    shapes = {f"layers.{n}.{part}.weight": (16, 32) for n in range(4) for part in ("up", "gate")}
    shapes |= {"embed.weight": (48, 16), "frozen.weight": (16, 32)}
    return {name: (torch.randn(shape) * 0.1).to(dtype) for name, shape in shapes.items()}


def train(
    run: Path,
    steps: Iterator[int] | range = range(10, 60, 10),
    *,
    made: Callable[..., torch.optim.Optimizer] = AdamW,
    dtype: torch.dtype = torch.float32,
    rate: float = 1e-3,
    **options: Any,
) -> Path:
    """Train, and save some steps as transformers does."""
    weights = {n: torch.nn.Parameter(w) for n, w in begin(0, dtype).items()}
    frozen = weights["frozen.weight"]
    trained = [weight for weight in weights.values() if weight is not frozen]
    optimizer = made(trained, lr=rate, **options)
    saved = {*steps}
    for step in range(1, max(saved) + 1):
        for weight in trained:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        if step in saved:
            (folder := run / f"checkpoint-{step}").mkdir(parents=True)
            save_file({n: w.detach() for n, w in weights.items()}, folder / "model.safetensors")
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return run


def weights_of(run: Path, step: int) -> Weights:
    return load_file(run / f"checkpoint-{step}/model.safetensors")


def change(run: Path, step: int = 50, **weights: torch.Tensor) -> None:
    """Give some weights of a step, with double underscores for dots, other values."""
    values = {name.replace("__", "."): value.contiguous() for name, value in weights.items()}
    save_file(weights_of(run, step) | values, run / f"checkpoint-{step}/model.safetensors")


def change_all(run: Path, weights: Weights, step: int = 50) -> None:
    change(run, step, **{name.replace(".", "__"): value for name, value in weights.items()})


def reasons(run: Path, **options: Any) -> dict[str, str]:
    steps = ckptool.verify_run(run, every=True, **options).steps
    return {step.path.name: reason for step in steps for reason in step.reasons}


def test_a_learning_rate_beyond_floats(tmp_path: Path) -> None:
    optimizer = train(tmp_path) / "checkpoint-50/optimizer.pt"
    state = torch.load(optimizer)
    state["param_groups"][0]["lr"] = 10**400
    torch.save(state, optimizer)
    assert reasons(tmp_path) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_a_step_before(dtype: torch.dtype, tmp_path: Path) -> None:
    run = train(tmp_path, dtype=dtype)
    assert reasons(run) == {}
    change_all(run, {UP: weights_of(run, 30)[UP]})
    assert reasons(run) == {
        "checkpoint-50": f"counts-differ: {UP}: as in checkpoint-30, but not as in checkpoint-40,"
        " which is newer: they are of two saves (--ignore counts-differ counts it as good)"
    }
    assert reasons(run, ignore=("counts-differ",)) == {}
    assert fates(pruned(run, keep_last=1))["checkpoint-40"] == "keep"
    change_all(run, {UP: weights_of(run, 40)[UP]})
    why = f"counts-differ: {UP}: as in checkpoint-40, but not what the optimizer keeps of it"
    assert reasons(run)["checkpoint-50"].startswith(why)


def test_a_shard_of_a_step_before_has_most_matrices(tmp_path: Path) -> None:
    run = train(tmp_path)
    now, before = weights_of(run, 50), weights_of(run, 40)
    change_all(run, {name: before[name] for name in now if name != UP})
    assert "and 5 more: as in checkpoint-40, but not what the" in reasons(run)["checkpoint-50"]


def test_a_matrix_of_a_step_before_with_momentum(tmp_path: Path) -> None:
    run = train(tmp_path, made=SGD, momentum=0.9, rate=0.1)
    assert reasons(run) == {}
    change_all(run, {UP: weights_of(run, 40)[UP]})
    assert reasons(run)["checkpoint-50"].startswith(f"counts-differ: {UP}: as in checkpoint-40")


def test_exchanged_layers(tmp_path: Path) -> None:
    run = train(tmp_path)
    now = weights_of(run, 50)
    change_all(run, {UP: now[DOWN], DOWN: now[UP]})
    why = f"weights-unrelated: {UP}: has the values that {DOWN} had in checkpoint-40: layers were"
    assert reasons(run)["checkpoint-50"].startswith(why)
    change_all(run, now)
    before = weights_of(run, 40)
    change_all(run, {UP: before[DOWN], DOWN: before[UP]}, step=40)
    assert [*reasons(run)] == ["checkpoint-40"]  # the one after it is right


def test_weights_of_another_model(tmp_path: Path) -> None:
    run = train(tmp_path)
    now = weights_of(run, 50)
    change_all(run, {UP: begin(1)[UP]})
    why = f"weights-unrelated: {UP}: like nothing that it was in checkpoint-40 and checkpoint-30:"
    assert reasons(run)["checkpoint-50"].startswith(why)
    change_all(run, now | begin(1))
    assert reasons(run)["checkpoint-50"].startswith("weights-unrelated: embed.weight, ")
    (run / "checkpoint-50").rename(run / "checkpoint-500")  # it may have been trained that long
    assert reasons(run) == {}


@pytest.mark.parametrize("inner", ["unet", "unet_ema"])
def test_a_model_inside_a_step(inner: str, tmp_path: Path) -> None:
    """As diffusers' scripts save it in accelerate's folder."""
    torch.manual_seed(0)
    model = {f"down_blocks.{n}.to_k.weight": torch.randn(16, 32) for n in range(3)}
    for step in range(10, 60, 10):
        (folder := tmp_path / f"checkpoint-{step}/{inner}").mkdir(parents=True)
        model = {name: value + 0.01 * torch.randn_like(value) for name, value in model.items()}
        save_file(model, folder / "diffusion_pytorch_model.safetensors")
        (folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
        state = torch.optim.AdamW([torch.nn.Parameter(torch.ones(16, 32))]).state_dict()
        torch.save(state, folder.parent / "optimizer.bin")
        torch.save({"step": 0}, folder.parent / "random_states_0.pkl")
    assert reasons(tmp_path) == {}
    first, second, *_ = model
    model |= {first: model[second], second: model[first]}
    save_file(model, folder / "diffusion_pytorch_model.safetensors")
    why = f"weights-unrelated: {inner}: {first}: has the values that {second} had in checkpoint-40"
    assert reasons(tmp_path)["checkpoint-50"].startswith(why)


@pytest.mark.parametrize("model", ["unet/model.safetensors", "pytorch_lora_weights.safetensors"])
def test_a_model_inside_is_what_the_optimizer_around_it_trains(model: str, tmp_path: Path) -> None:
    """As diffusers' scripts save it, with an average of it beside it."""
    for folder in train(tmp_path).iterdir():
        weights = load_file(folder / "model.safetensors")
        del weights["frozen.weight"]
        for name in (model, "unet_ema/model.safetensors"):
            (folder / name).parent.mkdir(exist_ok=True)
            save_file(weights, folder / name)
        (folder / "unet_ema/config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
        (folder / "model.safetensors").unlink()
        (folder / "optimizer.pt").rename(folder / "optimizer.bin")
        torch.save({"step": 0}, folder / "random_states_0.pkl")
    assert reasons(tmp_path) == {}
    shutil.copy(tmp_path / "checkpoint-40" / model, tmp_path / "checkpoint-50" / model)
    why = "its weights are those of checkpoint-40, but not its optimizer"
    assert reasons(tmp_path)["checkpoint-50"].startswith(f"counts-differ: {model}: {why}")


def test_stacked_layers(tmp_path: Path) -> None:
    """Each is looked at by itself."""
    run = tmp_path / "run"
    torch.manual_seed(0)
    experts = torch.randn(8, 16, 32)
    for step in range(10, 60, 10):
        experts = experts + 0.01 * torch.randn_like(experts)
        saved = experts.clone()
        if step == 50:
            saved[2], saved[5] = experts[5], experts[2]
        (run / f"checkpoint-{step}").mkdir(parents=True)
        names = ("gate_proj", "up_proj")
        tensors = {f"model.layers.0.mlp.experts.{name}": saved.clone() for name in names}
        save_file(tensors, run / f"checkpoint-{step}/model.safetensors")
    (found,) = reasons(run).values()
    assert "experts.2.gate_proj: has the values that model.layers.0.mlp.experts.5." in found


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"rate": 1e-1}, id="weights that change completely"),
        pytest.param({"rate": 1e-8, "dtype": torch.bfloat16}, id="a rate too small to be seen"),
        pytest.param({"steps": (10, 11, 12, 200)}, id="steps saved seldom after many"),
        pytest.param({"made": SGD, "rate": 1.0}, id="no state"),
    ],
)
def test_what_may_move_so(how: dict[str, Any], tmp_path: Path) -> None:
    assert reasons(train(tmp_path, **how)) == {}


def test_what_is_frozen_from_some_step_on(tmp_path: Path) -> None:
    run = train(tmp_path)
    before, state = weights_of(run, 40), torch.load(run / "checkpoint-40/optimizer.pt")
    path = run / "checkpoint-50/optimizer.pt"
    now = torch.load(path)
    names = [name for name in begin(0) if name != "frozen.weight"]
    now["state"][names.index(UP)] = state["state"][names.index(UP)]
    torch.save(now, path)
    change_all(run, {UP: before[UP]})
    assert reasons(run) == {}


def test_the_last_step_has_no_rate(tmp_path: Path) -> None:
    """A save has the rate of the step that would follow it."""
    run = train(tmp_path)
    path = run / "checkpoint-50/optimizer.pt"
    state = torch.load(path)
    state["param_groups"][0]["lr"] = 0.0
    torch.save(state, path)
    assert reasons(run) == {}
    change_all(run, {UP: weights_of(run, 40)[UP]})
    assert reasons(run)["checkpoint-50"].startswith(f"counts-differ: {UP}: as in checkpoint-40")


def test_a_rate_of_zero_that_is_no_float(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.randn(32, 48)) for _ in range(4)]
    optimizer = AdamW([{"params": weights[:1]}, {"params": weights[1:]}], lr=1e-3)
    for step in range(1, 6):
        optimizer.param_groups[0]["lr"] = 1e-3 if step < 4 else 0
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        model = {f"layers.{at}.weight": weight.detach() for at, weight in enumerate(weights)}
        state = {"model": model, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, tmp_path / f"step-{step}.pt")
    assert reasons(tmp_path) == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_not_of_another_model(value: float, tmp_path: Path) -> None:
    run = train(tmp_path)
    change_all(run, {UP: weights_of(run, 50)[UP].index_fill(1, torch.arange(0, 32, 4), value)})
    assert reasons(run)["checkpoint-50"].startswith("not-finite: ")
    assert reasons(run, allow_nonfinite=True) == {}


def test_a_layer_may_be_added_between_others(tmp_path: Path) -> None:
    run = train(tmp_path)
    now = weights_of(run, 50)
    added = {name.replace(".1.", ".4."): now[name.replace(".1.", ".3.")] for name in (UP,)}
    moved = {f"layers.{n}.up.weight": now[f"layers.{n - 1}.up.weight"] for n in (1, 2, 3)}
    change_all(run, moved)
    assert reasons(run)["checkpoint-50"].startswith("weights-unrelated: ")
    change_all(run, moved | added)
    assert reasons(run) == {}


@pytest.mark.parametrize("names", [("q", "q_target"), ("agent.policy", "agent.policy_old")])
def test_a_module_may_be_made_anew_of_another(names: tuple[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    values, copied = torch.randn(4, 32, 48), torch.randn(4, 32, 48)
    for step in range(1, 6):
        parts = zip(names, (values, copied), strict=True)
        model = {f"{part}.layers.{n}.w": each[n].clone() for part, each in parts for n in range(4)}
        torch.save({"model": model, "step": step}, tmp_path / f"step-{step}.pt")
        if step % 2 == 0:
            copied = values
        values = values * 0.3 + torch.randn(4, 32, 48)
    assert reasons(tmp_path) == {}


def test_a_memory_may_be_emptied_at_times(tmp_path: Path) -> None:
    run = train(tmp_path)
    for step in range(10, 60, 10):
        change(run, step, memory=torch.randn(100, 20) if step % 20 else torch.zeros(100, 20))
    assert [*reasons(run)] == ["checkpoint-20"]  # there is only one save before it
    change(run, 20, memory=torch.ones(100, 20))
    assert reasons(run) == {}
    change_all(run, {"frozen.weight": torch.zeros(16, 32)}, 40)
    assert reasons(run)["checkpoint-40"].startswith("weight-zero: frozen.weight: all values are")


def test_what_was_made_zero_long_ago_is_meant(tmp_path: Path) -> None:
    run = train(tmp_path)
    for step in (10, 20, 30, 40, 50):
        (run / f"checkpoint-{step}" / "optimizer.pt").unlink()
        if step > 10:
            change_all(run, {"frozen.weight": torch.zeros(16, 32)}, step)
    assert [*reasons(run)] == ["checkpoint-40", "checkpoint-30", "checkpoint-20"]


def test_adapters_may_begin_again(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        torch.manual_seed(step // 40)
        names = [f"base.layers.{n}.q_proj.lora_{half}.weight" for n in range(2) for half in "AB"]
        tensors = {name: torch.randn(8, 64) + step * 1e-4 for name in names}
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file(tensors, tmp_path / f"checkpoint-{step}/adapter_model.safetensors")
    assert reasons(tmp_path) == {}


def test_momentum_that_is_lost(tmp_path: Path) -> None:
    run = train(tmp_path, made=SGD, momentum=0.9)
    path = run / "checkpoint-50/optimizer.pt"
    state = torch.load(path)
    for each in state["state"].values():
        each["momentum_buffer"].zero_()
    torch.save(state, path)
    why = "moments-zero: state.0.momentum_buffer: all momentum is zero, but not in checkpoint-40:"
    assert reasons(run)["checkpoint-50"].startswith(why)
    assert reasons(run, ignore=("moments-zero",)) == {}


def test_moments_that_are_lost_with_the_steps_that_they_count(tmp_path: Path) -> None:
    run = train(tmp_path)
    path = run / "checkpoint-50/optimizer.pt"
    state = torch.load(path)
    for tensor in (tensor for each in state["state"].values() for tensor in each.values()):
        tensor.zero_()
    torch.save(state, path)
    why = "moments-zero: state.0.exp_avg: all momentum is zero, but not in checkpoint-40:"
    assert reasons(run)["checkpoint-50"].startswith(why)
    assert [*reasons(run)] == ["checkpoint-50"]


def test_a_mean_that_is_lost_and_counts_no_steps(tmp_path: Path) -> None:
    """As of Lion, which keeps nothing else."""
    run = train(tmp_path)
    for path in run.glob("*/optimizer.pt"):
        state = torch.load(path)
        for each in state["state"].values():
            del each["step"], each["exp_avg_sq"]
            if path.parent.name == "checkpoint-50":
                each["exp_avg"].zero_()
        torch.save(state, path)
    why = "moments-zero: state.0.exp_avg: all momentum is zero, but not in checkpoint-40:"
    assert reasons(run)["checkpoint-50"].startswith(why)
    assert [*reasons(run)] == ["checkpoint-50"]


def test_each_optimizer_is_read_once_for_the_steps_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for series in ("one", "other"):  # whose steps are assessed by turns
        train(run / series, range(10, 80, 10))
    read = list[Path]()

    def note(path: Path, options: ReadOptions) -> Survey | None:
        read.append(path)
        return survey_readable(path, options)

    monkeypatch.setattr(saves, "survey_readable", note)
    assert ckptool.verify_run(run, every=True).ok
    assert sorted(read) == sorted(run.glob("*/*/optimizer.pt"))


def test_a_training_that_began_again_and_came_less_far(tmp_path: Path) -> None:
    """The steps that it did not come to are the first one's, and older."""
    run = train(tmp_path, made=SGD, rate=0.1)
    for step, made_anew in ((10, begin(1)), (20, begin(1)), (30, begin(1))):
        change_all(run, made_anew | {"embed.weight": begin(step)["embed.weight"]}, step)
        for file in (run / f"checkpoint-{step}").iterdir():
            os.utime(file, (2_000_000_000, 2_000_000_000 + step))
    assert reasons(run) == {}


def test_a_matrix_of_the_first_step(tmp_path: Path) -> None:
    """However long ago that was, it may be what training began with."""
    run = train(tmp_path, range(10, 80, 10))
    change_all(run, {UP: weights_of(run, 10)[UP]}, step=70)
    why = f"counts-differ: {UP}: as in checkpoint-10, but not as in checkpoint-60, which is newer"
    assert reasons(run)["checkpoint-70"].startswith(why)
    change_all(run, weights_of(run, 10), step=70)
    why = "counts-differ: its weights are those of checkpoint-10, but not its optimizer"
    assert reasons(run)["checkpoint-70"].startswith(why)


def test_a_model_that_has_grown_since_the_first_step(tmp_path: Path) -> None:
    run = train(tmp_path, range(10, 80, 10))
    for step in range(10, 40, 10):
        change_all(run, {"embed.weight": weights_of(run, step)["embed.weight"][:40]}, step)
    change_all(run, {UP: weights_of(run, 50)[UP]}, step=70)
    assert reasons(run)["checkpoint-70"].startswith(f"counts-differ: {UP}: as in checkpoint-50")


@pytest.mark.parametrize("code", ["zeros-at-end", "zeros-inside"])
def test_zeros_that_a_crash_left(code: str, tmp_path: Path) -> None:
    run = train(tmp_path)
    file = run / "checkpoint-50/model.safetensors"
    data = bytearray(file.read_bytes())
    stop = len(data) if code == "zeros-at-end" else 12 << 10
    data[8 << 10 : stop] = bytes(stop - (8 << 10))
    file.write_bytes(data)
    why = reasons(run)["checkpoint-50"]
    assert why.startswith(f"{code}: model.safetensors: ")
    assert why.endswith(f"(--ignore {code} counts it as good)")
    assert reasons(run, ignore=(code, "counts-differ", "weight-zero", "weights-unrelated")) == {}
