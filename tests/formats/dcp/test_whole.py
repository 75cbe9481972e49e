"""State dicts whose containers torch's DCP stores as one value, or not at all."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool


class Settings(dict[str, Any]):
    """A class of a trainer's own for its settings."""


WEIGHT = torch.arange(6.0).reshape(2, 3)
STATES: dict[str, dict[str, Any]] = {
    "tuple": {"w": WEIGHT, "t": (1, torch.ones(2), {"a": 2})},
    "list of tuples": {"w": WEIGHT, "l": [(torch.ones(2), 1), (torch.zeros(3), 2), 5]},
    "list of lists": {"l": [[(torch.ones(2),)], [3]], "m": {"l": [(WEIGHT, 1)]}},
    "list with more": {"l": [(torch.ones(2), 1), WEIGHT, {"t": (torch.zeros(1),)}]},
    "tied in a tuple": {"w": WEIGHT, "t": (WEIGHT, WEIGHT)},
    "counter": {"s": {"m": Counter({"a": 1, "b": 2}), "lr": 1}, "w": WEIGHT},
    "empty counter": {"s": {"m": Counter(), "d": defaultdict(list), "lr": 1}, "w": WEIGHT},
    "list of counters": {"s": [Counter({"a": 1}), [[defaultdict(int, a=1)]]], "l": {"w": WEIGHT}},
    "counter in a tuple": {"s": {"t": (WEIGHT, Counter({"a": 1})), "lr": 1}},
    "class of a dict": {"s": {"c": Settings(lr=1, more=Settings(x=[2])), "lr": 1}, "w": WEIGHT},
}


def changed(tree: Any) -> Any:
    """Return another state dict with the same keys."""
    if isinstance(tree, dict):
        other = copy.copy(tree)
        for key, value in tree.items():
            other[key] = changed(value)
        return other
    if isinstance(tree, list | tuple):
        return type(tree)(map(changed, tree))
    return tree + 1 if isinstance(tree, torch.Tensor | int) else tree


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.fixture(params=["convert", "again", "save", "reshard"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Write a state dict as DCP, in each way."""
    target = tmp_path / "out"

    def written(state: dict[str, Any]) -> Path:
        if request.param == "save":
            ckptool.save(state, target, to="dcp", fsync=False)
        elif request.param == "again":
            dcp.save(state, checkpoint_id=tmp_path / "first", no_dist=True)
            ckptool.convert(tmp_path / "first", target, to="dcp", fsync=False)
        else:
            torch.save(state, tmp_path / "m.pt")
            if request.param == "convert":
                ckptool.convert(tmp_path / "m.pt", target, to="dcp", fsync=False)
            else:
                ckptool.reshard(tmp_path / "m.pt", target, to="dcp", mesh="2", fsync=False)
        return target

    return written


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_torch_loads_what_it_does_not_enter(write: Any, state: dict[str, Any]) -> None:
    path = write(state)
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    assert names == flatten_state_dict(state)[0].keys()
    loaded = changed(state)
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    assert alike(loaded, state)
    assert ckptool.verify(path)


@pytest.fixture
def trained() -> dict[str, Any]:
    """A state dict with an empty dict, as a GradScaler that is not enabled has."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {}}


def test_torch_loads_a_state_dict_with_an_empty_dict(write: Any, trained: dict[str, Any]) -> None:
    loaded = copy.deepcopy(changed(trained))
    dcp.load(loaded, checkpoint_id=write(trained), no_dist=True)
    assert alike(loaded, trained)


def test_an_empty_dict_is_named_in_a_note(trained: dict[str, Any], tmp_path: Path) -> None:
    """And its absence is no difference: no DCP folder has one."""
    torch.save(trained, tmp_path / "m.pt")
    report = ckptool.convert(tmp_path / "m.pt", tmp_path / "out", to="dcp", fsync=False)
    assert "not carried: scaler: DCP does not store empty dicts" in report.notes
    assert ckptool.compare(tmp_path / "out", tmp_path / "m.pt")
    assert ckptool.compare(tmp_path / "m.pt", tmp_path / "out")
    torch.save(trained | {"scaler": {"scale": 1}}, tmp_path / "other.pt")
    assert not ckptool.compare(tmp_path / "out", tmp_path / "other.pt")


def test_a_reader_has_no_empty_dict(trained: dict[str, Any], tmp_path: Path) -> None:
    torch.save(trained, tmp_path / "m.pt")
    loaded = changed(trained)
    reader = ckptool.dcp.CheckpointReader(tmp_path / "m.pt")
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert alike(loaded, trained)


def scheduled() -> dict[str, Any]:
    """What a program saves that has a MultiStepLR: its milestones are a Counter."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(WEIGHT.clone())], lr=1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    return {"w": WEIGHT.clone(), "schedule": schedule.state_dict()}


def test_a_scheduler_with_milestones_loads(write: Any) -> None:
    path, loaded = write(scheduled()), scheduled()
    loaded["schedule"]["last_epoch"] = -1
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    assert loaded["schedule"]["last_epoch"] == 0
    assert loaded["schedule"]["milestones"][3] == 1


def test_milestones_stay_a_counter_and_load_from_a_file(tmp_path: Path) -> None:
    ckptool.save(scheduled(), tmp_path / "m.pt", fsync=False)
    ckptool.convert(tmp_path / "m.pt", tmp_path / "copy.pt", fsync=False)
    for name in ("m.pt", "copy.pt"):
        milestones = torch.load(tmp_path / name)["schedule"]["milestones"]
        assert type(milestones) is Counter
        assert milestones == {3: 1, 5: 1}
    loaded = scheduled()
    loaded["schedule"]["milestones"] = Counter({3: 7, 5: 7})
    ckptool.load(tmp_path / "m.pt", loaded)
    assert loaded["schedule"]["milestones"] == milestones
    loaded["schedule"]["milestones"] = None
    ckptool.load(tmp_path / "m.pt", loaded)
    assert loaded["schedule"]["milestones"] == milestones
    reader = ckptool.dcp.CheckpointReader(tmp_path / "m.pt")
    dcp.load(scheduled(), storage_reader=reader, no_dist=True)


def test_a_counter_equals_its_entries(tmp_path: Path) -> None:
    torch.save(scheduled(), tmp_path / "m.pt")
    ckptool.convert(tmp_path / "m.pt", tmp_path / "out", to="dcp", fsync=False)
    assert ckptool.compare(tmp_path / "out", tmp_path / "m.pt")
    other = scheduled()
    other["schedule"]["milestones"][3] = 2
    torch.save(other, tmp_path / "other.pt")
    assert not ckptool.compare(tmp_path / "out", tmp_path / "other.pt")


def test_a_list_that_had_an_empty_dict_can_be_opened_by_torch(tmp_path: Path) -> None:
    """torch's own folder cannot, without a state dict: it finds no value at that position."""
    torch.save({"groups": [{}, {"w": WEIGHT}]}, tmp_path / "m.pt")
    ckptool.convert(tmp_path / "m.pt", tmp_path / "out", to="dcp", fsync=False)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    assert alike(torch.load(tmp_path / "whole.pt"), {"groups": {"1": {"w": WEIGHT}}})
