"""Optimizers of numbered parameters, saved with DCP, which makes text of all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptool


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "lr": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("at", [("optimizer",), ("state", "optimizers", "main"), ()], ids=str)
def test_an_optimizer_loads_its_state_from_what_is_converted(
    at: tuple[str, ...], tmp_path: Path
) -> None:
    _, optimizer = trained(3)
    state: Any = optimizer.state_dict()
    for key in reversed(at):
        state = {key: state, "other": {"state": {"0": torch.ones(1)}}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ckptool.convert(tmp_path / "dcp", tmp_path / "m.pt", to="torch-save", fsync=False)
    loaded = torch.load(tmp_path / "m.pt")
    if at:
        assert list(loaded["other"]["state"]) == ["0"]
    for key in at:
        loaded = loaded[key]
    _, other = trained(0)
    other.load_state_dict(loaded)
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_names_stay_as_they_are(tmp_path: Path) -> None:
    """Also in a DCP folder that is written again."""
    _, optimizer = trained(1)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ckptool.convert(tmp_path / "dcp", tmp_path / "again", to="dcp", fsync=False)
    first, again = (
        dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("dcp", "again")
    )
    assert first.state_dict_metadata.keys() == again.state_dict_metadata.keys()
    assert first.planner_data == again.planner_data
    assert ckptool.compare(tmp_path / "dcp", tmp_path / "again")
