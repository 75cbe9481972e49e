"""Steps of a run of which a part rightly stands still, while its trainer counts on."""

from __future__ import annotations

import copy
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptool

_LAST = 30
"""The step after which something stands still; the run is saved every ten of forty steps."""


def train(*, freezes: bool = False) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Train two layers; yield each saved step, the model and its optimizer.

    If it ``freezes``, only biases are trained in the end.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 41):
        for weight in model.parameters():
            is_frozen = freezes and step > _LAST and weight.ndim > 1
            weight.grad = None if is_frozen else torch.randn_like(weight)
        optimizer.step()
        if step % 10 == 0:
            yield step, model.state_dict(), optimizer.state_dict()


def reasons(run: Path) -> dict[str, str]:
    steps = ckptool.verify_run(run, every=True).steps
    return {step.path.name: reason for step in steps for reason in step.reasons}


def test_a_resume_without_the_scheduler_of_lightning(tmp_path: Path) -> None:
    for step, model, optimizer in train():
        scheduled = min(step, _LAST)
        schedule = {"last_epoch": step, "_step_count": step + 1, "_last_lr": [1e-3]}
        progress = {"optimizer": {"step": {"total": {"completed": step}}}}
        content = {
            "pytorch-lightning_version": "2.6.6",
            "global_step": step,
            "epoch": 0,
            "state_dict": model,
            "optimizer_states": [optimizer],
            "lr_schedulers": [schedule] if step == scheduled else [],
            "loops": {
                "fit_loop": {
                    "epoch_loop.automatic_optimization.optim_progress": progress,
                    "epoch_loop.scheduler_progress": {"total": {"completed": scheduled}},
                }
            },
        }
        torch.save(content, tmp_path / f"epoch=0-step={step}.ckpt")
    assert reasons(tmp_path) == {}


def test_matrices_that_are_frozen_before_biases(tmp_path: Path) -> None:
    for step, model, optimizer in train(freezes=True):
        (folder := tmp_path / f"global_step{step}").mkdir()
        content = {
            "module": model,
            "optimizer": optimizer,
            "global_steps": step,
            "skipped_steps": 0,
            "dp_world_size": 1,
        }
        torch.save(content, folder / "mp_rank_00_model_states.pt")
    assert reasons(tmp_path) == {}


def plain_run(run: Path, **counts: int) -> Path:
    """Save as scripts do, in a file a step, with ``counts`` of what each step is divided by."""
    for step, model, optimizer in train():
        rate = {"last_epoch": step, "_step_count": step + 1, "_last_lr": [1e-3 / step]}
        optimizer["param_groups"][0]["lr"] = 1e-3 / step
        content = {"model": model, "optimizer": optimizer, "lr_sched": rate}
        numbers = {name: step // by for name, by in counts.items()}
        torch.save(content | numbers, run / f"ckpt_{step}.pt")
    return run


def change(run: Path, **values: object) -> None:
    torch.save(torch.load(run / "ckpt_40.pt") | values, run / "ckpt_40.pt")


@pytest.mark.parametrize("name", ["iter_num", "global_step", "iteration", "num_updates"])
def test_a_count_of_the_step_before(name: str, tmp_path: Path) -> None:
    run = plain_run(tmp_path, **{name: 1, "epoch": 20, "best_epoch": 1})
    assert reasons(run) == {}
    change(run, best_epoch=30)
    assert reasons(run) == {}
    change(run, **{name: 30})
    why = f"counts-differ: {name} is 30, as in ckpt_30.pt, but the optimizer"
    assert reasons(run)["ckpt_40.pt"].startswith(why)


def test_epochs_of_the_step_before(tmp_path: Path) -> None:
    for step, model, _ in train():
        epoch = step // 10
        torch.save({"model": model, "epoch": epoch}, tmp_path / f"model_{epoch}.pth")
    assert reasons(tmp_path) == {}
    torch.save({"model": model, "epoch": 3}, tmp_path / "model_4.pth")
    why = "counts-differ: epoch is 3, as in model_3.pth, but its name has gone on by 1"
    assert reasons(tmp_path)["model_4.pth"].startswith(why)


def test_a_scheduler_in_the_other_half_that_has_stopped(tmp_path: Path) -> None:
    for step, model, optimizer in train():
        schedule = {"last_epoch": min(step, _LAST), "_step_count": 1, "_last_lr": [1e-3 / step]}
        content = {"model": model, "optimizer": optimizer, "lr_sched": schedule}
        torch.save(content | {"step": step}, tmp_path / f"D_{step}.pth")
        torch.save(
            {"model": model, "optimizer": optimizer, "step": step}, tmp_path / f"G_{step}.pth"
        )
    assert reasons(tmp_path) == {}


def test_a_scheduler_whose_name_looks_like_that_of_a_file(tmp_path: Path) -> None:
    for step, model, optimizer in train():
        (folder := tmp_path / f"global_step{step}").mkdir()
        schedule = {"last_epoch": step, "_last_lr": [1e-3]}
        counts = {"global_steps": min(step, _LAST), "skipped_steps": 0, "dp_world_size": 1}
        content = {"module": model, "optimizer": optimizer, "x: sched": schedule, **counts}
        torch.save(content, folder / "mp_rank_00_model_states.pt")
    assert "x: sched.last_epoch has gone on by 10" in reasons(tmp_path)["global_step40"]


def counted(step: int) -> dict[str, Any]:
    """What scripts save that rightly stops after 30 steps."""
    return {
        "step": step,
        "kl_annealer": {"step": min(step, _LAST)},
        "args": {"epochs": min(step, _LAST), "iteration": min(step, _LAST)},
        "train_epochs_done": (3, 5, 7, 8)[step // 10 - 1],
        "epoch": (4, 6, 8, 8)[step // 10 - 1],
        "total_steps": min(step, _LAST),
    }


def test_what_rightly_stops_while_steps_go_on(tmp_path: Path) -> None:
    """A phase, a limit, where the last process began, and epochs that are longer than saves."""
    run = plain_run(tmp_path)
    for path in run.iterdir():
        step = int(path.stem.partition("_")[2])
        torch.save(torch.load(path) | counted(step), path)
    assert reasons(run) == {}


@pytest.mark.parametrize(("last", "is_sound"), [(31, True), (39, True), (40, False)])
def test_the_end_of_a_loop_that_is_saved_once_more(
    last: int, is_sound: bool, tmp_path: Path
) -> None:
    run = plain_run(tmp_path, global_step=1, epoch=10)
    (run / "ckpt_40.pt").unlink()
    shutil.copy(run / "ckpt_30.pt", run / f"ckpt_{last}.pt")
    assert [*reasons(run)] == ([] if is_sound else ["ckpt_40.pt"])
    (epochs := tmp_path / "epochs").mkdir()
    for epoch in (1, 2, 3):
        shutil.move(run / f"ckpt_{epoch}0.pt", epochs / f"epoch_{epoch}.pt")
    shutil.copy(epochs / "epoch_3.pt", epochs / "epoch_4.pt")
    assert reasons(epochs) == {}


def test_a_warmup_by_a_scheduler_of_torch_and_the_rate_by_hand(tmp_path: Path) -> None:
    run = plain_run(tmp_path)
    for path in run.iterdir():
        content = torch.load(path)
        scheduler = content["lr_sched"]
        count = min(scheduler["last_epoch"], _LAST)
        rates = [1e-3 * count / _LAST]
        content["lr_sched"] = {"last_epoch": count, "_last_lr": rates, "base_lrs": [1e-3]}
        is_warm = scheduler["last_epoch"] > _LAST
        content["optimizer"]["param_groups"][0]["lr"] = 7e-4 if is_warm else rates[0]
        torch.save(content, path)
    assert reasons(run) == {}


def test_saves_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    run = plain_run(tmp_path, epoch=10, it=10)
    change(run, epoch=3)
    assert reasons(run) == {}


def test_few_updates_in_an_epoch(tmp_path: Path) -> None:
    for epoch, updates in enumerate((0, 1, 2, 2)):
        model = {"weight": torch.randn(16, 32)}
        torch.save({"model": model, "epoch": epoch, "updates": updates}, tmp_path / f"e{epoch}.pt")
    assert reasons(tmp_path) == {}


def test_a_scheduler_of_the_step_before(tmp_path: Path) -> None:
    run = plain_run(tmp_path)
    old = torch.load(run / "ckpt_30.pt")["lr_sched"]
    change(run, lr_sched=old)
    why = "counts-differ: lr_sched.last_epoch is 30, as in ckpt_30.pt, but the"
    assert reasons(run)["ckpt_40.pt"].startswith(why)
    change(run, lr_sched=old | {"_last_lr": [1e-3 / 40]})  # it warmed up, and is not stepped since
    assert reasons(run) == {}
    change(run, lr_sched=old, other=old | {"_last_lr": [1e-3 / 40]})  # another has taken over
    assert reasons(run) == {}


@pytest.mark.parametrize(
    "set_rate",
    [
        pytest.param(lambda group: group.update(lr=1e-4), id="by hand"),
        pytest.param(lambda group: group.update(swa_lr=1e-5, lr=2.4e-5), id="by SWALR"),
    ],
)
def test_a_rate_that_its_scheduler_gives_no_longer(
    set_rate: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    run = plain_run(tmp_path)
    groups = torch.load(run / "ckpt_40.pt")["optimizer"]["param_groups"]
    set_rate(groups[0])
    content = torch.load(run / "ckpt_40.pt")["optimizer"] | {"param_groups": groups}
    change(run, lr_sched=torch.load(run / "ckpt_30.pt")["lr_sched"], optimizer=content)
    assert reasons(run) == {}


@pytest.mark.parametrize("name", ["scheduler_{}.pt", "checkpoint-{}/scheduler.pt"])
def test_the_file_of_a_scheduler_of_the_step_before(name: str, tmp_path: Path) -> None:
    run = plain_run(tmp_path)
    for path in [*run.iterdir()]:
        content, step = torch.load(path), path.stem.rpartition("_")[2]
        (file := run / name.format(step)).parent.mkdir(exist_ok=True)
        torch.save(content.pop("lr_sched"), file)
        beside = file.with_name(file.name.replace("scheduler", "optimizer"))
        torch.save(content.pop("optimizer"), beside)
        path.unlink()
        if file.parent == run:
            torch.save(content, run / f"model_{step}.pt")
        else:
            save_file(content["model"], file.parent / "model.safetensors")
    assert reasons(run) == {}
    shutil.copy(run / name.format(30), run / name.format(40))
    [reason] = reasons(run).values()
    assert f"{(run / name.format(40)).name}.last_epoch is 30, as in " in reason


def test_one_of_schedulers_that_counts_epochs_of_the_step_before(tmp_path: Path) -> None:
    run = plain_run(tmp_path)
    for path in run.iterdir():
        content = torch.load(path)
        content["lr_sched"]["last_epoch"] //= 10
        content["lr_sched"] = [content["lr_sched"]]
        torch.save(content, path)
    assert reasons(run) == {}
    change(run, lr_sched=torch.load(run / "ckpt_30.pt")["lr_sched"])
    why = "counts-differ: lr_sched.0.last_epoch is 3, as in ckpt_30.pt, but the"
    assert reasons(run)["ckpt_40.pt"].startswith(why)


def test_a_copy_of_an_older_step_in_the_state_of_an_application(tmp_path: Path) -> None:
    """torch's recipe of DCP, with the counter of PRIME-RL."""
    for step, model, optimizer in train():
        state = {"model": model, "optimizers": optimizer, "progress": {"step": step}}
        dcp.save({"app": state}, checkpoint_id=tmp_path / f"step_{step}", no_dist=True)
    assert reasons(tmp_path) == {}
    shutil.copy(tmp_path / "step_30" / "__0_0.distcp", tmp_path / "step_40")
    why = "counts-differ: its weights, its optimizer and what it counts are those of step_30"
    assert reasons(tmp_path)["step_40"].startswith(f"{why}: it is a copy")


@pytest.mark.parametrize("count", ["global_step", "epoch", "iter", "update"])
def test_a_copy_of_an_older_step_under_a_newer_name(count: str, tmp_path: Path) -> None:
    run = plain_run(tmp_path, **{count: 1})
    shutil.copy(run / "ckpt_30.pt", run / "ckpt_40.pt")
    why = "counts-differ: its weights, its optimizer and what it counts are those of ckpt_30.pt"
    assert reasons(run)["ckpt_40.pt"].startswith(f"{why}: it is a copy")
    change(run, **{count: 40})  # nothing was trained in between
    assert reasons(run) == {}
    change(run, **{count: 30})
    for step in (10, 20):
        (run / f"ckpt_{step}.pt").unlink()
    assert reasons(run) == {}  # names may count something else


def test_a_copy_of_the_first_step_under_the_name_of_the_second(tmp_path: Path) -> None:
    """The steps after it show what names count."""
    run = plain_run(tmp_path, global_step=1)
    shutil.copy(run / "ckpt_10.pt", run / "ckpt_20.pt")
    assert "those of ckpt_10.pt: it is a copy" in reasons(run)["ckpt_20.pt"]
    (run / "ckpt_30.pt").unlink()
    (run / "ckpt_40.pt").unlink()
    assert reasons(run) == {}


@pytest.mark.parametrize("end", [10, 20])
def test_an_end_that_was_saved_once_more_before_the_run_went_on(end: int, tmp_path: Path) -> None:
    run = plain_run(tmp_path, global_step=1)
    shutil.copy(run / f"ckpt_{end}.pt", run / f"ckpt_{end + 1}.pt")
    assert reasons(run) == {}


def test_a_copy_among_saves_of_every_epoch(tmp_path: Path) -> None:
    run = plain_run(tmp_path, epoch=10)
    for epoch in range(1, 5):
        (run / f"ckpt_{epoch}0.pt").rename(run / f"ckpt_{epoch}.pt")
    shutil.copy(run / "ckpt_2.pt", run / "ckpt_3.pt")
    assert "those of ckpt_2.pt: it is a copy" in reasons(run)["ckpt_3.pt"]


def test_the_scheduler_of_megatron_counts_samples(tmp_path: Path) -> None:
    """Megatron-LM d98e8a6, core/optimizer_param_scheduler.py: a step adds the batch to them."""
    for step, model, optimizer in train():
        (folder := tmp_path / f"iter_{step:07d}/mp_rank_00").mkdir(parents=True)
        arguments = Namespace(consumed_train_samples=4 * step)
        content = {"model": model, "optimizer": {"optimizer": optimizer}, "iteration": step}
        content |= {"args": arguments, "checkpoint_version": 3.0}
        content |= {"opt_param_scheduler": {"num_steps": 4 * step, "max_lr": 1e-3}}
        torch.save(content, folder / "model_optim_rng.pt")
    assert reasons(tmp_path) == {}
    torch.save(content | {"opt_param_scheduler": {"num_steps": 120}}, folder / "model_optim_rng.pt")
    why = "counts-differ: opt_param_scheduler.num_steps is 120, as in iter_0000030,"
    assert reasons(tmp_path)["iter_0000040"].startswith(why)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("which", ["G", "D"])
def test_half_of_a_gan_of_the_step_before(which: str, every: int, tmp_path: Path) -> None:
    """As of VITS, RVC and GPT-SoVITS, which save a count of epochs in each of both files."""
    for step, model, optimizer in train():
        content = {"optimizer": optimizer, "iteration": step // 10 * every}
        torch.save(content | {"model": model}, tmp_path / f"G_{step}.pth")
        other = {name: -weight for name, weight in model.items()}
        torch.save(content | {"model": other}, tmp_path / f"D_{step}.pth")
    assert reasons(tmp_path) == {}
    shutil.copy(tmp_path / f"{which}_30.pth", tmp_path / f"{which}_40.pth")
    (why,) = reasons(tmp_path).values()
    assert f"iteration is {3 * every}, as in G_30.pth, but" in why


def test_the_model_and_the_optimizer_of_the_step_before_in_torchtitan_s_save(
    tmp_path: Path,
) -> None:
    """It skips no steps, and counts those that its optimizer takes."""
    for step, model, optimizer in train():
        if step <= _LAST:
            old = copy.deepcopy((model, optimizer))
        moments = {f"state.{n}.{k}": v for n, s in old[1]["state"].items() for k, v in s.items()}
        state: dict[str, Any] = {**old[0], "optimizer": moments}
        state |= {"train_state": {"step": step, "ntokens_seen": 64 * step}}
        state |= {"lr_scheduler": {"last_epoch": step}, "dataloader": {"dp_rank_0": b"seen"}}
        dcp.save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    why = "counts-differ: its weights and its optimizer are those of step-30, but train_state.step"
    found = reasons(tmp_path)
    assert [*found] == ["step-40"]
    assert found["step-40"].startswith(f"{why} counts 10 steps more: they are of two saves")


@pytest.mark.parametrize("lost", [1, 2])
def test_state_that_a_flat_optimizer_has_lost(lost: int, tmp_path: Path) -> None:
    for step, model, optimizer in train():
        names, kept = [*model], 4 - lost if step > _LAST else 4
        flat = {f"param_groups.{name}.lr": 1e-3 for name in names}
        flat |= {
            f"state.{names[at]}.{kind}": value
            for at, state in [*optimizer["state"].items()][:kept]
            for kind, value in state.items()
        }
        state = {**model, "optimizer": flat}
        dcp.save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    found = reasons(tmp_path)
    assert [*found] == ["step-40"]
    assert found["step-40"].startswith("optimizer-incomplete: optimizer.state.1.")
    assert ": without optimizer state, which step-30 has" in found["step-40"]


@pytest.mark.parametrize("older", [10, 30])
def test_exchanged_steps(older: int, tmp_path: Path) -> None:
    for step, model, optimizer in train():
        state = {"model": model, "optimizer": optimizer, "step": step}
        torch.save(state, tmp_path / f"step_{step}.pt")
    assert reasons(tmp_path) == {}
    shutil.move(tmp_path / "step_40.pt", tmp_path / "40")
    shutil.move(tmp_path / f"step_{older}.pt", tmp_path / "step_40.pt")
    shutil.move(tmp_path / "40", tmp_path / f"step_{older}.pt")
    found = reasons(tmp_path)
    why = f"counts-differ: it counts {older}, and step_{older}.pt counts 40: they were exchanged"
    assert found["step_40.pt"].startswith(why)
    if older != 10:  # of the first step nothing before it tells
        why = "counts-differ: it counts 40, and step_40.pt counts 30: they were exchanged"
        assert found[f"step_{older}.pt"].startswith(why)


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_count_of_the_steps_that_are_left(has_optimizer: bool, tmp_path: Path) -> None:
    """It is the number of another step, and is in the name of the step that has its own."""
    for step, model, optimizer in train():
        state = {"model": model, "steps_remaining": 50 - step}
        state |= {"optimizer": optimizer} if has_optimizer else {}
        torch.save(state, tmp_path / f"step_{step}.pt")
    assert reasons(tmp_path) == {}
