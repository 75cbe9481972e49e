"""Steps that a trainer counts in a way of its own: several numbers, and a file for each part."""

from __future__ import annotations

from pathlib import Path

import torch
from prune_runs import fates
from trainer_runs import OPTIMIZER, WEIGHT, age, saved, weights, write

import ckptool

BOTH = {"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}


def listed(run: Path) -> list[tuple[str, int | None, int]]:
    """Return each step's name, number and how many other files it has; the newest first."""
    report = ckptool.verify_run(run, every=True)
    assert [reason for step in report.steps for reason in step.reasons] == []
    return [(step.path.name, step.number, len(step.beside)) for step in report.steps]


def removed(run: Path) -> set[str]:
    return {
        name for name, fate in fates(ckptool.prune(run, keep_last=1)).items() if fate == "remove"
    }


def test_the_epoch_its_step_and_the_step_of_all_in_names_of_areal(tmp_path: Path) -> None:
    names = [f"epoch{n // 2}epochstep{n % 2}globalstep{n}" for n in range(4)]
    for at, name in enumerate(names):
        write(tmp_path / name, {"model.safetensors": weights})
        age(tmp_path / name, at)
    assert listed(tmp_path) == [(name, n, 0) for n, name in [*enumerate(names)][::-1]]
    assert removed(tmp_path) == {*names[:3]}


def test_backups_of_onetrainer_are_gone_on_from_not_what_it_saves_for_use(tmp_path: Path) -> None:
    for at, numbers in enumerate(("10-0-4", "20-1-2", "30-2-0")):
        backup = tmp_path / "backup" / f"2025-05-01_12-0{at}-00-backup-{numbers}"
        write(
            backup, {"lora/lora.safetensors": weights, "optimizer/optimizer.pt": saved(OPTIMIZER)}
        )
        age(backup, at)
    write(tmp_path / "save", {f"my-2025-05-01_13-00-00-save-{numbers}.safetensors": weights})
    report = ckptool.verify_run(tmp_path, every=True)
    assert report.ok
    assert {step.number: step.export for step in report.steps if step.path.suffix} == {30: True}
    assert [step.number for step in report.steps if not step.export] == [30, 20, 10]
    assert report.latest_good is not None
    assert report.latest_good.path == backup
    gone = {"2025-05-01_12-00-00-backup-10-0-4", "2025-05-01_12-01-00-backup-20-1-2"}
    assert removed(tmp_path) == gone


def test_the_models_and_the_state_of_training_of_physicsnemo_are_one_step(tmp_path: Path) -> None:
    for epoch in (9, 10):
        parts = {
            "FNO": {"w": WEIGHT},
            "Decoder": {"w": WEIGHT},
            "checkpoint": {"epoch": epoch, "optimizer_state_dict": OPTIMIZER},
        }
        for part, state in parts.items():
            torch.save(state, file := tmp_path / f"{part}.0.{epoch}.pt")
            age(file, epoch)
    assert listed(tmp_path) == [("Decoder.0.10.pt", 10, 2), ("Decoder.0.9.pt", 9, 2)]


def test_shards_of_each_step_of_fairseq(tmp_path: Path) -> None:
    for epoch in (1, 2):
        for rank in (0, 1):
            torch.save(BOTH, file := tmp_path / f"checkpoint_{epoch}_{epoch}00-shard{rank}.pt")
            age(file, epoch)
    assert listed(tmp_path) == [(f"checkpoint_{n}_{n}00-shard0.pt", 100 * n, 1) for n in (2, 1)]


def test_files_that_count_behind_their_suffix(tmp_path: Path) -> None:
    """FunASR; what was not finished, a hash and parts of a file are no steps."""
    names = ["model.pt.ep1", "model.pt.ep2.500", "model.pt.ep10", "model.pt", "model.pt.best"]
    for at, name in enumerate(names):
        torch.save(BOTH, tmp_path / name)
        age(tmp_path / name, min(at, 2))
    for other in ("model.pt.tmp", "model.pt.bak", "model.pt.ep3.md5", "model.pt.00", "model.pt.01"):
        (tmp_path / other).write_bytes((tmp_path / "model.pt").read_bytes()[:700])
    numbers = {name: number for name, number, _ in listed(tmp_path)}
    assert numbers == dict(zip(names, (1, 500, 10, None, None), strict=True))
    assert listed(tmp_path)[0][0] == "model.pt.ep10"
    assert removed(tmp_path) == {"model.pt.ep1"}
    assert ckptool.open(tmp_path / "model.pt.ep10").tensors["model.w"].shape == (4,)


def test_models_that_are_saved_to_be_evaluated_below_files_of_ranks(tmp_path: Path) -> None:
    """DINOv2, which has the teacher of each evaluation in a folder of its own."""
    for step in (99, 199):
        for rank in (0, 1):
            torch.save(BOTH, file := tmp_path / f"model_{step:07d}.rank_{rank}.pth")
            age(file, step)
        write(tmp_path / f"eval/training_{step}", {"teacher_checkpoint.pth": saved({"w": WEIGHT})})
        age(tmp_path / f"eval/training_{step}", step)
    report = ckptool.verify_run(tmp_path, every=True)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "model_0000199.rank_0.pth"
    assert [step.path.name for step in report.steps if step.export] == [
        "teacher_checkpoint.pth"
    ] * 2


def test_espnet_counts_epochs_and_goes_on_from_what_records_the_last(tmp_path: Path) -> None:
    for epoch in range(1, 13):
        weight = {"w": torch.rand(16, 8)}
        state = {"model": weight, "reporter": {"epoch": epoch}, "optimizers": [OPTIMIZER]}
        for name, saved_state in ((f"{epoch}epoch.pth", weight), ("checkpoint.pth", state)):
            torch.save(saved_state, tmp_path / name)
            age(tmp_path / name, epoch)
    (tmp_path / "valid.acc.best.pth").symlink_to("3epoch.pth")
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "checkpoint.pth"
    assert report.chosen == "by the epoch that it records"
    assert removed(tmp_path) == {f"{epoch}epoch.pth" for epoch in range(1, 12) if epoch != 3}
    (tmp_path / "checkpoint.pth").write_bytes(b"")
    alone = ckptool.verify_run(tmp_path)
    assert alone.latest_good is not None
    assert alone.latest_good.path.name == "12epoch.pth"
