"""State dicts that cannot be flattened: colliding names, values that contain themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.dcp import CheckpointReader
from ckptool.errors import Unsupported

TARGETS = [("torch-save", "out.pt"), ("safetensors", "out"), ("dcp", "out")]


@pytest.mark.parametrize(("to", "name"), TARGETS)
def test_a_dict_in_itself_is_named_and_the_rest_is_carried(
    tmp_path: Path, to: str, name: str
) -> None:
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "step": 3}
    state["model"]["parent"] = state
    torch.save(state, tmp_path / "m.pt")
    report = ckptool.convert(tmp_path / "m.pt", tmp_path / name, to=to)
    assert (
        "not read: model.parent refers back to the whole value, which contains it" in report.notes
    )
    verified = ckptool.verify(tmp_path / "m.pt")
    assert verified.ok
    assert "value-not-written" in {one.code for one in verified.findings}
    assert report.objects == 1
    found = ckptool.open(tmp_path / name)
    assert torch.equal(found.read("model.w"), torch.ones(2))
    assert "model.parent" not in found.objects


@pytest.mark.parametrize(("to", "name"), TARGETS)
def test_names_that_collide_are_all_carried(tmp_path: Path, to: str, name: str) -> None:
    state = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3), "n": {1: 5, "1": 6}}
    torch.save(state, tmp_path / "m.pt")
    report = ckptool.convert(tmp_path / "m.pt", tmp_path / name, to=to)
    assert "a.b@2 is one of several values named 'a.b', at 'a' / 'b'" in report.notes
    out = tmp_path / name
    if to == "safetensors":
        with safe_open(out / "model.safetensors", "pt") as file:
            assert {n: file.get_tensor(n).tolist() for n in file.keys()} == {  # noqa: SIM118
                "a.b": [0.0] * 3,
                "a.b@2": [1.0] * 2,
            }
        return
    assert ckptool.compare(tmp_path / "m.pt", out).verify.ok
    if to == "dcp":
        dcp_to_torch_save(out, tmp_path / "again.pt")
        found = torch.load(tmp_path / "again.pt", weights_only=True)
        assert found["a.b@2"].tolist() == [1.0] * 2
        assert found["a.b"].tolist() == [0.0] * 3
    else:
        found = torch.load(out, weights_only=True)
        assert found["a"]["b"].tolist() == [1.0] * 2
        assert found["a.b"].tolist() == [0.0] * 3
        assert found["n"] == {1: 5, "1": 6}


@pytest.mark.parametrize("state", [{"": torch.ones(2), "b": torch.ones(1)}, torch.ones(2)])
def test_a_tensor_without_a_name_is_given_one_and_that_is_reported(
    state: Any, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "m.pt")
    for to in ("safetensors", "dcp-safetensors"):
        report = ckptool.convert(tmp_path / "m.pt", tmp_path / to, to=to)
        assert "a tensor without a name is written as 'value'" in report.notes
        assert ckptool.open(tmp_path / to).read("value").tolist() == [1, 1]


def test_what_is_excluded_is_not_said_to_be_carried(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "s": torch.ones(2, 2).to_sparse()}, tmp_path / "m.pt")
    report = ckptool.convert(tmp_path / "m.pt", tmp_path / "out", to="dcp", drop="s")
    assert report.notes == ()


def test_dcp_is_not_written_with_names_that_it_is_not_read_with(tmp_path: Path) -> None:
    torch.save({"s\udc80": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(Unsupported, match=r"not Unicode: 's\\udc80'"):
        ckptool.convert(tmp_path / "m.pt", tmp_path / "out", to="dcp")


def test_ranks_that_order_their_names_otherwise_agree(tmp_path: Path) -> None:
    for rank in range(2):
        items = [("a", {"b": torch.ones(2)}), ("a.b", torch.zeros(3))]
        torch.save(dict(items[::-1] if rank else items), tmp_path / f"model_rank{rank}.pt")
    tensors = ckptool.open(tmp_path).tensors
    assert {name: entry.shape for name, entry in tensors.items()} == {"a.b": (3,), "a.b@2": (2,)}


T = torch.arange(4.0)
ROOTS = [
    pytest.param(T, {"value": T}, "the value is written as {'value': ...}", id="tensor"),
    pytest.param(7, {"value": 7}, "the value is written as {'value': ...}", id="value"),
    pytest.param([T, {"x": [T + 1]}], {"0": T, "1": {"x": [T + 1]}}, "the list is", id="list"),
    pytest.param((T, [T + 1]), {"0": T, "1": [T + 1]}, "the tuple is", id="tuple"),
    pytest.param({"": T, "b": T}, {"value": T, "b": T}, "written as 'value'", id="empty key"),
    pytest.param({"": {"": T}}, {"": {"": T}}, None, id="empty keys"),
    pytest.param({"": T, "value": T + 1}, {"value": T + 1, "value@2": T}, "'value@2'", id="both"),
    pytest.param({1: T, 2: {3: T}}, {"1": T, "2": {"3": T}}, None, id="integers"),
]


@pytest.mark.parametrize(("state", "template", "note"), ROOTS)
def test_torch_loads_whatever_root_is_written_as_dcp(
    tmp_path: Path, state: Any, template: dict[str, Any], note: str | None
) -> None:
    """Into a state dict of the written names, and without one."""
    torch.save(state, tmp_path / "m.pt")
    report = ckptool.convert(tmp_path / "m.pt", tmp_path / "dcp", to="dcp")
    assert [one for one in report.notes if "DCP h" in one] == [] or note is not None
    assert note is None or any(note in one for one in report.notes), report.notes
    filled = zeros(template)
    dcp.load(filled, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert alike(filled, template)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "again.pt")
    assert alike(torch.load(tmp_path / "again.pt", weights_only=True), template)
    filled = zeros(template)
    dcp.load(filled, storage_reader=CheckpointReader(tmp_path / "m.pt"), no_dist=True)
    assert alike(filled, template)
    assert ckptool.compare(tmp_path / "m.pt", tmp_path / "dcp").verify.ok


def zeros(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [zeros(value) for value in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
