"""Steps of several models, each with an optimizer in a file of its own, side by side."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool

PARTS = {"trunk": (32, 16), "embedder": (16, 8), "metric_loss": (8, 10)}
LATER = 4


def train(run: Path) -> Path:
    """Train for some epochs as pytorch-metric-learning 2.9 does, which saves the best one, too."""
    torch.manual_seed(0)
    models = {name: nn.Linear(*shape) for name, shape in PARTS.items()}
    optimizers = {n: torch.optim.AdamW(m.parameters(), lr=1e-3) for n, m in models.items()}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["trunk"], 2)
    for epoch in range(1, LATER + 1):
        for name, model in models.items():
            model(torch.randn(8, PARTS[name][0])).square().mean().backward()
            optimizers[name].step()
        scheduler.step()
        for suffix in (str(epoch), *(["best2"] if epoch == 2 else [])):
            for name, model in models.items():
                torch.save(model.state_dict(), run / f"{name}_{suffix}.pth")
                torch.save(optimizers[name].state_dict(), run / f"{name}_optimizer_{suffix}.pth")
            torch.save(scheduler.state_dict(), run / f"trunk_scheduler_by_epoch_{suffix}.pth")
    return run


def reasons(run: Path) -> dict[str, str]:
    steps = ckptool.verify_run(run, every=True).steps
    return {step.path.name: reason for step in steps for reason in step.reasons}


def test_a_step_of_several_models_and_optimizers(tmp_path: Path) -> None:
    report = ckptool.verify_run(train(tmp_path), every=True)
    assert report.ok
    assert [(step.number, len(step.beside)) for step in report.steps] == [
        (4, 6), (3, 6), (2, 6), (2, 6), (1, 6)
    ]  # fmt: skip


@pytest.mark.parametrize("part", [*PARTS, *(f"{name}_optimizer" for name in PARTS)])
def test_a_part_of_an_earlier_step(part: str, tmp_path: Path) -> None:
    train(tmp_path)
    shutil.copy(tmp_path / f"{part}_3.pth", tmp_path / f"{part}_{LATER}.pth")
    of = part.removesuffix("_optimizer")
    what = "its weights are those" if part == of else "its optimizer is that"
    [[step, reason]] = reasons(tmp_path).items()
    assert step == f"embedder_{LATER}.pth"
    assert f"{what} of {of}_3.pth, but not" in reason


@pytest.mark.parametrize("part", ["trunk", "metric_loss_optimizer", "trunk_scheduler_by_epoch"])
def test_a_part_that_is_lost(part: str, tmp_path: Path) -> None:
    (train(tmp_path) / f"{part}_{LATER}.pth").unlink()
    assert [*reasons(tmp_path).values()] == [f"{part} is missing; every earlier whole step has it"]


NETS = {"G": (32, 16), "D": (16, 8)}


def train_gan(run: Path, shapes: dict[str, tuple[int, int]], discriminated: int) -> Path:
    """Train a GAN, of which the discriminator is trained in some steps alone."""
    torch.manual_seed(0)
    nets = {half: nn.Linear(*shape) for half, shape in shapes.items()}
    optimizers = {half: torch.optim.AdamW(net.parameters()) for half, net in nets.items()}
    for step in range(1, LATER + 1):
        for half in "GD" if step <= discriminated else "G":
            nets[half](torch.randn(8, shapes[half][0])).square().mean().backward()
            optimizers[half].step()
        for half, net in nets.items():
            torch.save(net.state_dict(), run / f"net{half}_{step}.pth")
            torch.save(optimizers[half].state_dict(), run / f"opt{half}_{step}.pth")
    return run


@pytest.mark.parametrize(
    ("shapes", "discriminated"), [(NETS, LATER), (NETS, 2), (dict.fromkeys("GD", (16, 8)), LATER)]
)
def test_a_gan(shapes: dict[str, tuple[int, int]], discriminated: int, tmp_path: Path) -> None:
    assert reasons(train_gan(tmp_path, shapes, discriminated)) == {}


@pytest.mark.parametrize("half", NETS)
@pytest.mark.parametrize("part", ["net", "opt"])
def test_half_of_a_gan_of_an_earlier_step(part: str, half: str, tmp_path: Path) -> None:
    train_gan(tmp_path, NETS, LATER)
    shutil.copy(tmp_path / f"{part}{half}_3.pth", tmp_path / f"{part}{half}_{LATER}.pth")
    what = "its weights are those" if part == "net" else "its optimizer is that"
    [reason] = reasons(tmp_path).values()
    assert f"{what} of net{half}_3.pth, but not" in reason
