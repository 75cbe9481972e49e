"""Steps of which each rank saved a file: several in one folder, and the last among them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptool


def saved(folder: Path, name: str, minute: int, **values: object) -> None:
    """Save a part of a model as each of two ranks does: DINOv2's FSDP, gsplat."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        file = folder / name.format(rank)
        torch.save({"model": {"w": torch.full((4, 3), rank + 1.0)}, **values}, file)
        os.utime(file, (1_700_000_000 + 60 * minute,) * 2)


def ranked(run: Path) -> list[tuple[str, list[str]]]:
    report = ckptool.verify_run(run, every=True)
    assert report.ok
    return [(s.path.name, [path.name for path in s.beside]) for s in report.steps]


@pytest.mark.parametrize("name", ["ckpt_{}_rank{{}}.pt", "model_{:07}.rank_{{}}.pth"])
def test_saves_of_ranks_in_a_folder_of_the_run_are_steps(name: str, tmp_path: Path) -> None:
    steps = [name.format(step) for step in (6999, 29999)]
    for minute, step in enumerate(steps):
        saved(tmp_path / "ckpts", step, minute)
    assert ranked(tmp_path) == [(s.format(0), [s.format(1)]) for s in reversed(steps)]


def test_one_save_of_ranks_in_a_folder_of_the_run_is_one(tmp_path: Path) -> None:
    saved(tmp_path / "ckpts", "ckpt_6999_rank{}.pt", 0)
    assert len(ckptool.verify_run(tmp_path, every=True).steps) == 1


def test_the_last_of_ranks_is_a_step_by_what_its_own_file_records(tmp_path: Path) -> None:
    for minute, step in enumerate((999, 1999)):
        saved(tmp_path, f"model_{step:07}.rank_{{}}.pth", minute, iteration=step)
    saved(tmp_path, "model_final.rank_{}.pth", 0, iteration=2999)
    assert [name for name, _ in ranked(tmp_path)] == [
        "model_final.rank_0.pth",
        "model_0001999.rank_0.pth",
        "model_0000999.rank_0.pth",
    ]
