"""Steps whose parts are files beside each other, as trainers without a library for it save them."""

from __future__ import annotations

from pathlib import Path

import torch
from trainer_runs import OPTIMIZER, WEIGHT

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.assessment import RunReport, verify_run


def checked(run: Path) -> RunReport:
    return verify_run(run, VerifyOptions(), every=True)


def test_a_model_and_its_optimizer_of_one_bare_number_are_one_step(tmp_path: Path) -> None:
    for step in (10, 20):
        torch.save({"w": WEIGHT}, tmp_path / f"model_{step}.pt")
        torch.save(OPTIMIZER, tmp_path / f"optim_{step}.pt")
    assert [(step.number, step.ok) for step in checked(tmp_path).steps] == [(20, True), (10, True)]
    (tmp_path / "model_20.pt").unlink()
    assert not checked(tmp_path).steps[0].ok
