"""Steps of which one rank's file is of another step."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.commands.verify.checks.content import locate_whole
from ckptool.commands.verify.history import shard_files


def train(run: Path, *, trained: tuple[str, ...] = ("layers", "embed"), last: int = 4) -> Path:
    """Save steps of a model whose matrices are cut among two ranks.

    Of the embedding only the first rows are trained, as of tokens that the data has.
    """
    torch.manual_seed(0)
    weights = {f"layers.{n}.{name}.weight": torch.randn(16, 32) for n in range(3) for name in "ud"}
    weights |= {"embed.weight": torch.randn(64, 16), "layers.0.frozen": torch.randn(16, 32)}
    for step in range(1, last + 1):
        for name in (name for name in weights if name.startswith(trained) and "fro" not in name):
            rows = 32 if name == "embed.weight" else None
            weights[name][:rows] += 0.01 * torch.randn_like(weights[name][:rows])
        file = run.parent / f"{step}.pt"
        torch.save({"model": weights, "step": step}, file)
        ckptool.reshard(file, run / f"step_{step}", mesh="2", to="dcp", fsync=False)
    return run


def reasons(run: Path) -> dict[str, str]:
    steps = ckptool.verify_run(run, every=True).steps
    return {step.path.name: reason for step in steps for reason in step.reasons}


@pytest.mark.parametrize("old", [1, 3])
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
def test_a_rank_s_file_of_an_earlier_step(old: int, file: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    assert reasons(run) == {}
    shutil.copy(run / f"step_{old}" / file, run / "step_4" / file)
    assert reasons(run) == {
        "step_4": f"counts-differ: {file}: the shards in it are those of step_{old}, but those in"
        " the other files are not: they are of two saves (--ignore counts-differ counts it as good)"
    }


def test_a_file_of_very_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer matrices tell then, whose shards are read."""
    monkeypatch.setattr(shard_files, "_MOST_SHARDS", 1)
    monkeypatch.setattr(shard_files, "_MOST_ASKED", 4)
    asked: list[set[str]] = []

    def located(survey: Any, names: Iterable[str]) -> Any:
        asked.append({*names})
        return locate_whole(survey, asked[-1])

    monkeypatch.setattr(shard_files, "locate_whole", located)
    run = train(tmp_path / "run")
    shutil.copy(run / "step_3" / "__1_0.distcp", run / "step_4")
    assert [*reasons(run)] == ["step_4"]
    assert max(map(len, asked)) <= 4


def test_rows_of_an_embedding_alone(tmp_path: Path) -> None:
    """The last rank has rows that stand still, and else what is frozen."""
    assert reasons(train(tmp_path / "run", trained=("embed",))) == {}


@pytest.mark.parametrize("name", ["tables.{}.weight", "experts.{}.w1", "layers.{}.moe_layer.fc1_w"])
def test_rows_that_were_not_looked_up(name: str, tmp_path: Path) -> None:
    """As of rare words in several tables, which lie in the files of the last rank."""
    torch.manual_seed(0)
    weights = {name.format(n): torch.randn(64, 32) for n in range(6)}
    for step in range(1, 5):
        for table in weights.values():
            table[:32] += 0.01 * torch.randn(32, 32)
        torch.save({"model": weights}, tmp_path / f"{step}.pt")
        target = tmp_path / f"run/step_{step}"
        ckptool.reshard(tmp_path / f"{step}.pt", target, mesh="2", to="dcp", fsync=False)
    assert reasons(tmp_path / "run") == {}


def test_rows_that_are_seldom_looked_up(tmp_path: Path) -> None:
    """Of the last rank's rows, only the last but one of each matrix is used in the last step."""
    torch.manual_seed(0)
    weights = {f"users.{n}.weight": torch.randn(512, 16) for n in range(6)}
    for step in range(1, 5):
        for rows in weights.values():
            rows[:256] += 0.01 * torch.randn(256, 16)
            rows[330] += 1
        torch.save({"model": weights, "step": step}, tmp_path / "saved.pt")
        target = tmp_path / "run" / f"step_{step}"
        ckptool.reshard(tmp_path / "saved.pt", target, mesh="2", to="dcp", fsync=False)
    assert reasons(tmp_path / "run") == {}
