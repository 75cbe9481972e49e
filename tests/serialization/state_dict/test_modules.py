"""Pickled modules are read as their state_dict() names them, with torch's own as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits
from torch import nn

import ckptool
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.state_dict.modules import module_state


class Named(nn.Parameter):
    """A subclass, which torch pickles as a plain parameter."""


def hook(*args: Any) -> None:
    """A hook that torch can pickle."""


class Net(nn.Module):
    """What names, buffers and parameters can be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.BatchNorm1d(4)])})
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.own = Named(torch.randn(2, 2).t())
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.nothing = None
        self.register_parameter("none", None)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.register_buffer("empty", None)
        self.body["a"].register_buffer("passing", torch.ones(3), persistent=False)
        self.several = nn.ParameterList([torch.ones(1), torch.zeros(1)])
        self.again = self.body["a"]
        self.activation = nn.functional.relu
        self.spare = nn.Dropout()
        self.body["a"].register_forward_hook(hook)
        self.own.register_hook(hook)


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(4, 3))


def trained() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net(torch.randn(4, 3)).sum().backward()
    return net


MODULES: list[Callable[[], nn.Module]] = [
    Net,
    spectral,
    trained,
    lambda: nn.TransformerEncoderLayer(4, 2, 8),
    lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    lambda: nn.Linear(2, 2).bfloat16(),
]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.filterwarnings("ignore")
def test_a_module_is_read_as_its_state_dict(
    tmp_path: Path, make: Callable[[], nn.Module], is_zip: bool
) -> None:
    module = make()
    torch.save(module, tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    report = ckptool.convert(tmp_path / "m.pt", tmp_path / "state.pt", to="torch-save")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert [*found] == [*module.state_dict()]
    assert {n: bits(t) for n, t in found.items()} == {
        n: bits(t) for n, t in module.state_dict().items()
    }
    make().load_state_dict(found)
    assert sum("is a module" in note for note in report.notes) == 1


def test_modules_inside_a_checkpoint(tmp_path: Path) -> None:
    """As Lightning keeps them among hyperparameters, and lists of them."""
    state = {
        "hyper_parameters": {"net": Net(), "loss": nn.CrossEntropyLoss(), "lr": 0.5},
        "parts": [nn.Linear(2, 2), {"deep": (nn.Linear(1, 1),)}],
        "w": torch.ones(2),
    }
    torch.save(state, tmp_path / "m.pt")
    catalog = ckptool.open(tmp_path / "m.pt").catalog
    expected = {f"hyper_parameters.net.{name}" for name in Net().state_dict()}
    expected |= {"parts.0.weight", "parts.0.bias", "w"}
    expected |= {"parts.1.deep.0.weight", "parts.1.deep.0.bias"}
    assert set(catalog.tensors) == expected
    assert set(catalog.objects) == {"hyper_parameters.lr", "hyper_parameters.loss"}
    assert sum("is a module" in note for note in catalog.notes) == 3


def test_a_module_in_a_dcp_folder(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    net = nn.Linear(3, 2)
    dcp.save({"net": net.eval(), "extra": (net,)}, checkpoint_id=tmp_path / "m", no_dist=True)
    catalog = ckptool.open(tmp_path / "m").catalog
    names = {"net.weight", "net.bias"}
    assert set(catalog.tensors) >= {"extra.0.weight", "extra.0.bias"} | names


def test_a_module_that_holds_itself_has_an_end(tmp_path: Path) -> None:
    net: Any = nn.Linear(2, 2)
    net._modules["self"] = net
    torch.save({"net": net, "w": torch.ones(1)}, tmp_path / "m.pt")
    catalog = ckptool.open(tmp_path / "m.pt").catalog
    assert set(catalog.tensors) == {"net.weight", "net.bias", "w"}
    assert "not read: net.self refers back to net, which contains it" in catalog.notes


@pytest.mark.parametrize("passing", [None, [["x"]], Call(Global("builtins", "set"), ([1],)), 3])
def test_a_set_of_names_may_be_anything(passing: Any) -> None:
    state = {"_parameters": {}, "_buffers": {"b": 1}, "_modules": {}}
    module = Call(Global("m", "C"), (), True, state | {"_non_persistent_buffers_set": passing})
    found = module_state(module)
    assert found is not None
    assert found.tensors == [("b", 1)]
