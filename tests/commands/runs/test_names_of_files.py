"""Files of torch.save that end in no usual suffix, or in none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from trainer_runs import OPTIMIZER, WEIGHT

import ckptool
from ckptool.errors import Unrecognized


@pytest.mark.parametrize(
    "name", ["checkpoint_{}.th", "checkpoint_epoch_{:05}.pyth", "model_{}", "epoch_{:02}"]
)
def test_any_file_of_torch_save_is_a_step(name: str, tmp_path: Path) -> None:
    """AudioCraft, SlowFast, the tutorials of torch; a text beside them is none."""
    for step in (1, 2, 30):
        torch.save({"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}, tmp_path / name.format(step))
    (tmp_path / "README").write_text("a text")
    newest = tmp_path / name.format(30)
    newest.write_bytes(newest.read_bytes()[:-200])
    report = ckptool.verify_run(tmp_path, every=True)
    assert [(step.path.name, step.ok) for step in report.steps] == [
        (name.format(30), False), (name.format(2), True), (name.format(1), True)
    ]  # fmt: skip


def test_the_generator_and_the_rest_of_hifigan_are_one_step(tmp_path: Path) -> None:
    for step in (5000, 2500000):
        torch.save({"generator": {"w": WEIGHT}}, tmp_path / f"g_{step:08}")
        state = {"mpd": {"w": WEIGHT}, "optim_g": OPTIMIZER, "steps": step}
        torch.save(state, tmp_path / f"do_{step:08}")
    for at, file in enumerate(sorted(tmp_path.iterdir(), key=lambda file: file.name[-8:])):
        os.utime(file, (1_700_000_000 + at,) * 2)
    report = ckptool.verify_run(tmp_path, every=True)
    assert report.ok
    assert [(step.path.name, [file.name for file in step.beside]) for step in report.steps] == [
        ("g_02500000", ["do_02500000"]), ("g_00005000", ["do_00005000"])
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["opt{}_{}.pth", "optim{}_{}.pth", "optimizer_{}_{}.pth"])
def test_the_optimizers_of_a_gan_are_no_steps_of_their_own(name: str, tmp_path: Path) -> None:
    for step in (10, 20):
        for half in "GD":
            torch.save({"w": WEIGHT}, tmp_path / f"net{half}_{step}.pth")
            torch.save(OPTIMIZER, tmp_path / name.format(half, step))
    report = ckptool.verify_run(tmp_path, every=True)
    assert [(step.ok, len(step.beside)) for step in report.steps] == [(True, 3), (True, 3)]


def test_an_entry_of_a_store_of_files_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    torch.save({"w": WEIGHT}, tmp_path / "blobs" / ("0f" * 20))
    with pytest.raises(Unrecognized):
        ckptool.verify_run(tmp_path)
