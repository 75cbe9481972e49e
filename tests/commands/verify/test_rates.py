"""A scheduler and an optimizer that accelerate saved, of one save or of two."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.optim import lr_scheduler as schedules
from verify.verify_runs import checked

from ckptool.commands.open import survey
from ckptool.commands.verify.checks.meaning.counts import optimizer_step_problems

Make = Callable[[torch.optim.Optimizer], Any]
OFTEN: dict[str, Make] = {
    "warm up": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, (step + 1) / 50)),
    "decay": lambda o: schedules.CosineAnnealingLR(o, 100),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=100),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 90)], [3]
    ),
}


class Training:
    """Trains with one scheduler or several, and saves as accelerate does."""

    def __init__(self, *made: Make, optimizers: int = 1, ranks: int = 1) -> None:
        self.weights = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(optimizers)]
        self.optimizers = [torch.optim.AdamW([weight], lr=1e-3) for weight in self.weights]
        pairs = zip(made, [*self.optimizers, *self.optimizers[:1]], strict=False)
        self.schedulers = [make(optimizer) for make, optimizer in pairs]
        self.ranks = ranks

    def step(self, times: int, *, scheduled: int = 1) -> None:
        for _ in range(times):
            for weight, optimizer in zip(self.weights, self.optimizers, strict=True):
                weight.grad = torch.randn(4, 4)
                optimizer.step()
            for _ in range(scheduled):
                for scheduler in self.schedulers:
                    scheduler.step()

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        tensors = {f"w{at}": weight.detach() for at, weight in enumerate(self.weights)}
        save_file(tensors, folder / "model.safetensors")
        for stem, each in (("optimizer", self.optimizers), ("scheduler", self.schedulers)):
            for at, one in enumerate(each):
                torch.save(one.state_dict(), folder / f"{stem}{f'_{at}' if at else ''}.bin")
        for rank in range(self.ranks):
            torch.save({"step": 0}, folder / f"random_states_{rank}.pkl")
        return folder


def counts(folder: Path) -> list[str]:
    findings = checked(folder).findings
    return [f"{f.code}: {f.message}" for f in findings if f.code.startswith("counts-")]


def mixed(run: Path, training: Training, file: str, **how: Any) -> Path:
    """Return a save in which a file is that of a save before."""
    training.step(6, **how)
    earlier = training.save(run / "checkpoint-6")
    training.step(4, **how)
    later = training.save(run / "checkpoint-10")
    assert counts(earlier) == counts(later) == []
    shutil.copy(earlier / file, later / file)
    return later


@pytest.mark.parametrize("kind", OFTEN)
@pytest.mark.parametrize(("processes", "file"), [(1, "optimizer"), (2, "scheduler")])
def test_files_of_two_saves(kind: str, processes: int, file: str, tmp_path: Path) -> None:
    training = Training(OFTEN[kind], ranks=processes)
    found = counts(mixed(tmp_path, training, f"{file}.bin", scheduled=processes))
    taken, counted = (6, 10) if file == "optimizer" else (10, 12)
    assert found == [
        f"counts-differ: scheduler.last_epoch is {counted}, but the optimizer has taken {taken}"
        " steps, and has another learning rate than it gave: they are of two saves"
    ]


@pytest.mark.parametrize(
    ("kind", "code"), [("warm up", "counts-differ"), ("decay", "counts-apart")]
)
def test_a_scheduler_begun_again(kind: str, code: str, tmp_path: Path) -> None:
    training = Training(OFTEN[kind])
    training.step(20)
    folder = training.save(tmp_path / "checkpoint-20")
    torch.save(Training(OFTEN[kind]).schedulers[0].state_dict(), folder / "scheduler.bin")
    (found,) = counts(folder)
    assert found.startswith(f"{code}: scheduler.last_epoch is 0, but the optimizer has taken 20")
    assert found.endswith("it would begin again")


@pytest.mark.parametrize("epochs", [0, 3])
def test_a_scheduler_of_epochs(epochs: int, tmp_path: Path) -> None:
    training = Training(lambda o: schedules.StepLR(o, 1, gamma=0.5))
    for _ in range(epochs):
        training.step(20, scheduled=0)
        training.schedulers[0].step()
    training.step(7, scheduled=0)
    assert counts(training.save(tmp_path / "sound")) == []
    for group in training.optimizers[0].param_groups:
        group["lr"] *= 0.1  # as users do who warm up by themselves
    found = [each for each in counts(training.save(tmp_path / "warm")) if "differ" in each]
    assert found == []


def test_several_schedulers_and_optimizers(tmp_path: Path) -> None:
    for at, training in enumerate(
        [
            Training(*OFTEN.values(), optimizers=3),
            Training(OFTEN["decay"], optimizers=2),  # one optimizer has none
            Training(OFTEN["decay"], OFTEN["warm up"]),  # both are of one optimizer
        ]
    ):
        training.step(10)
        assert counts(training.save(tmp_path / f"{at}")) == []


@pytest.mark.parametrize(
    ("count", "rate", "expected"),
    [
        (6, 1e-3, "counts-differ"),
        (0, 1e-3, "counts-apart"),  # a rate of its own, before the first step
        (10, 1e-3, None),
        (20, 1e-3, None),
        (2, 1e-3, None),  # of epochs
        (6, 0.0, None),
    ],
)
def test_a_scheduler_beside_the_folder_of_deepspeed(
    count: int, rate: float, expected: str | None, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("deepspeed_zero_2")
    torch.save({"last_epoch": count, "_last_lr": [rate] * 2}, folder / "scheduler.bin")
    torch.save({"step": 0}, folder / "random_states_0.pkl")
    surveyed = survey(folder)
    problems = optimizer_step_problems(surveyed, surveyed.catalog, {"": 10})
    codes = [p.code for p in problems if p.startswith("scheduler.last_epoch")]
    assert codes == [expected] * (expected is not None)
