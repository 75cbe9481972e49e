"""Steps whose parts are files beside each other, as trainers without a library for it save them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_runs import OPTIMIZER, WEIGHT

import ckptool
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.assessment import RunReport, verify_run
from ckptool.errors import Several


def checked(run: Path) -> RunReport:
    return verify_run(run, VerifyOptions(), every=True)


def nanochat(run: Path, *steps: int, ranks: int) -> Path:
    """nanochat 0.1, checkpoint_manager.py: each rank has the moments of the rows it updates."""
    for step in steps:
        torch.save({"_orig_mod.w": WEIGHT}, run / f"model_{step:06d}.pt")
        for rank in range(ranks):
            moments = {"exp_avg": torch.rand(2) + rank, "exp_avg_sq": torch.rand(2) + rank}
            state = {"state": {0: {"step": step, **moments}}, "param_groups": [{"params": [0]}]}
            torch.save(state, run / f"optim_{step:06d}_rank{rank}.pt")
        (run / f"meta_{step:06d}.json").write_text(f'{{"step": {step}}}')
    return run


def test_slices_of_an_optimizer_beside_a_whole_model_are_one_step(tmp_path: Path) -> None:
    run = nanochat(tmp_path, 20, 25, ranks=2)
    assert [(step.number, step.reasons, len(step.beside)) for step in checked(run).steps] == [
        (25, (), 2), (20, (), 2)
    ]  # fmt: skip
    assert ckptool.verify(run / "optim_000025_rank1.pt").ok
    with pytest.raises(Several):
        ckptool.verify(run)
    (run / "optim_000025_rank0.pt").unlink()
    newest, before = checked(run).steps
    assert "optim rank0 is missing" in newest.reasons[0]
    assert before.ok


def test_files_of_ranks_of_two_saves_with_padded_numbers_are_two(tmp_path: Path) -> None:
    for step in (20, 25):
        for rank in range(2):
            torch.save({"w": WEIGHT}, tmp_path / f"model_{step:06d}_rank{rank}.pt")
    with pytest.raises(Several, match=r"several saves: 000020 \(2 files.*, 000025"):
        ckptool.verify(tmp_path)


def test_a_model_and_its_optimizer_of_one_bare_number_are_one_step(tmp_path: Path) -> None:
    for step in (10, 20):
        torch.save({"w": WEIGHT}, tmp_path / f"model_{step}.pt")
        torch.save(OPTIMIZER, tmp_path / f"optim_{step}.pt")
    assert [(step.number, step.ok) for step in checked(tmp_path).steps] == [(20, True), (10, True)]
    (tmp_path / "model_20.pt").unlink()
    assert not checked(tmp_path).steps[0].ok
