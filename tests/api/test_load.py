"""ckptool.load: in place, strict, nested; what does not fit is refused before all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import CannotDo

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3.0)},
    "optimizer": {"state": [torch.ones(2), {"step": torch.tensor(5)}], "lr": 0.5},
    "step": 7,
    "shape": torch.Size([3, 4]),
}


def zeros(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    return [zeros(value) for value in tree] if type(tree) is list else None


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    return one == other if type(one) is not list else all(map(alike, one, other))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_a_nested_state_dict_is_filled_where_its_tensors_lie(saved: Path) -> None:
    state = zeros(STATE)
    weight = state["model"]["w"]
    report = ckptool.load(saved, state)
    assert alike(state, STATE)
    assert state["model"]["w"] is weight
    assert (len(report.loaded), report.missing, report.unexpected) == (7, (), ())
    assert report.nbytes == 12 * 4 + 3 * 4 + 2 * 4 + 8


def test_a_model_is_loaded_through_its_own_state_dict(tmp_path: Path) -> None:
    there, here = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_file({f"module.{n}": t for n, t in there.state_dict().items()}, tmp_path / "m.safetensors")
    ckptool.load(tmp_path / "m.safetensors", here.state_dict(), strip_prefix="module")
    assert torch.equal(here.weight, there.weight)
    assert torch.equal(here.bias, there.bias)


def test_names_that_only_one_has_are_listed(saved: Path) -> None:
    state = zeros(STATE)
    state["model"]["new"] = state["model"].pop("b")
    with pytest.raises(ckptool.KeysDiffer, match=r"missing \(1\): model.new") as caught:
        ckptool.load(saved, state)
    assert (caught.value.missing, caught.value.unexpected) == (("model.new",), ("model.b",))
    assert not state["model"]["w"].any()
    report = ckptool.load(saved, state, strict=False)
    assert (report.missing, report.unexpected) == (("model.new",), ("model.b",))
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])


def test_only_the_model(saved: Path) -> None:
    state = zeros(STATE["model"])
    ckptool.load(saved, state, model_only=True)
    assert alike(state, STATE["model"])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), r"float32 \[3, 4\] in the .*, float64 \[3, 4\]"),
        (torch.zeros(4, 3), r"float32 \[3, 4\] in the checkpoint, float32 \[4, 3\]"),
        (torch.zeros(3, 4, device="meta"), "on the meta device"),
        (torch.zeros(3, 1).expand(3, 4), "an expanded view"),
        (torch.zeros(3, 4).to_sparse(), "sparse"),
        (1.5, "a tensor in the checkpoint, a float in the state dict"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_is(
    saved: Path, other: Any, says: str
) -> None:
    state = zeros(STATE)
    state["model"]["w"] = other
    with pytest.raises(CannotDo, match=says):
        ckptool.load(saved, state)
    assert not state["model"]["b"].any()


def test_a_value_is_no_tensor(saved: Path) -> None:
    state = zeros(STATE) | {"step": torch.tensor(0)}
    with pytest.raises(CannotDo, match="step: a value in the checkpoint, a tensor"):
        ckptool.load(saved, state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(6, 8)[::2, ::2],
        lambda: torch.nn.Parameter(torch.zeros(3, 4)),
        lambda: torch.zeros(15)[3:].view(3, 4),
    ],
    ids=["transposed", "strided", "parameter", "offset"],
)
def test_memory_of_any_strides(saved: Path, make: Any) -> None:
    state = zeros(STATE)
    state["model"]["w"] = tensor = make()
    ckptool.load(saved, state)
    assert torch.equal(tensor.detach(), STATE["model"]["w"])


def test_an_unknown_option_is_a_type_error(saved: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'modelonly'"):
        ckptool.load(saved, {}, modelonly=True)  # type: ignore[call-arg]


def test_a_value_of_a_class_of_its_own_is_never_rebuilt(tmp_path: Path) -> None:
    import argparse

    torch.save({"args": argparse.Namespace(a=1), "w": torch.ones(2)}, tmp_path / "m.pt")
    state = {"w": torch.zeros(2)}
    ckptool.load(tmp_path / "m.pt", state, strict=False)
    assert torch.equal(state["w"], torch.ones(2))
    with pytest.raises(CannotDo, match=r"args: a argparse.Namespace, made of argparse.Namespace"):
        ckptool.load(tmp_path / "m.pt", {"args": None}, strict=False)
