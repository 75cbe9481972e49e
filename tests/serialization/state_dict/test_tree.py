"""Flattening state dicts and modules, against torch's own names, and nesting them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckptool
from ckptool.core.catalog import flat_name
from ckptool.errors import Damaged, Unsupported
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.state_dict.tree import StateDictWalk, assign_names, module_state, nest
from ckptool.serialization.state_dict.values import Repeated

TENSOR = Call(Global("torch._utils", "_rebuild_tensor_v2"), ())
LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just(TENSOR))
KEYS = st.one_of(st.sampled_from(["a", "b", "w"]), st.integers(0, 3))
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=10,
    ),
    min_size=1,
    max_size=4,
)


@given(TREES)
def test_nesting_undoes_flattening(tree: dict[Any, Any]) -> None:
    assert nest(leaves_of(tree)) == tree


@given(TREES, st.randoms(use_true_random=False))
def test_nesting_does_not_depend_on_the_order(tree: dict[Any, Any], random: Any) -> None:
    found = leaves_of(tree)
    random.shuffle(found)
    assert nest(found) == tree


def as_torch_would_have_it(tree: Any) -> Any:
    import torch

    if tree is TENSOR:
        return torch.ones(1)
    if isinstance(tree, dict):
        return {key: as_torch_would_have_it(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(as_torch_would_have_it, tree))
    return tree


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abw"), inner, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_names_are_those_of_dcp(tree: Any) -> None:
    """Apart from empty dicts, which DCP loses."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    state = {"root": tree}
    theirs = set(flatten_state_dict(as_torch_would_have_it(state))[0])
    ours = {flat_name(path): leaf for path, leaf in leaves_of(state)}
    assert {name for name, leaf in ours.items() if leaf != {}} == theirs


def leaves_of(tree: Any) -> list[Any]:
    return list(StateDictWalk("test").leaves(tree))


def defaultdict_of(**entries: Any) -> Call:
    call = Call(Global("collections", "defaultdict"), (Global("__builtin__", "dict"),))
    call.entries.extend(entries.items())
    return call


@pytest.mark.parametrize(
    ("value", "names"),
    [
        pytest.param((3, {"w": TENSOR}, {}), ["0", "1.w", "2"], id="epoch, model, optimizer"),
        pytest.param({"a": ([{"w": TENSOR}],)}, ["a.0.0.w"], id="tuple of lists of dicts"),
        pytest.param({"a": (1, {"b": 2})}, ["a"], id="tuple without tensors"),
        pytest.param(defaultdict_of(a=TENSOR, b={"c": 1}), ["a", "b.c"], id="defaultdict"),
        pytest.param({"t": (defaultdict_of(w=TENSOR),)}, ["t.0.w"], id="defaultdict in a tuple"),
        pytest.param({"d": defaultdict_of()}, ["d"], id="empty defaultdict"),
    ],
)
def test_every_container_that_holds_a_tensor_is_entered(value: Any, names: list[str]) -> None:
    assert [flat_name(path) for path, _ in leaves_of(value)] == names


COLLIDING = {"a": {"b": 1, "c": {"d": 2}}, "a.b": 3, "a.c": {"d": 4}, 1: 5, "1": 6, "1@2": 7}


@pytest.mark.parametrize("backwards", [False, True])
def test_paths_of_one_name_get_names_of_their_own_in_any_order(backwards: bool) -> None:
    found = leaves_of(COLLIDING)
    named = assign_names(found[::-1] if backwards else found)
    assert {name: leaf for name, (_, leaf) in named.items()} == {
        "a.b": 3,
        "a.b@2": 1,
        "a.c.d": 4,
        "a.c.d@2": 2,
        "1": 6,
        "1@2": 7,
        "1@3": 5,
    }
    assert nest(named.values()) == COLLIDING


def test_a_value_in_itself_is_one_that_is_repeated() -> None:
    tree: dict[str, Any] = {"w": TENSOR}
    tree["again"] = tree
    tree["deep"] = {"list": [tree, {"x": 1}]}
    tree["deep"]["up"] = tree["deep"]
    found = {flat_name(path): leaf for path, leaf in leaves_of(tree)}
    assert found == {
        "w": TENSOR,
        "again": Repeated("the whole value"),
        "deep.list.0": Repeated("the whole value"),
        "deep.list.1.x": 1,
        "deep.up": Repeated("deep"),
    }


def test_one_dict_in_several_places_is_not_in_itself() -> None:
    shared = {"w": TENSOR}
    tree = {"a": shared, "b": [shared, shared]}
    assert {flat_name(path) for path, _ in leaves_of(tree)} == {
        "a.w",
        "b.0.w",
        "b.1.w",
    }


def test_what_unfolds_without_end_is_a_bomb() -> None:
    tree: dict[str, Any] = {"x": 1}
    for _ in range(40):
        tree = {"a": tree, "b": tree}
    with pytest.raises(Damaged, match="nested"):
        leaves_of(tree)


def test_a_list_with_a_hole_becomes_a_dict() -> None:
    found = leaves_of({"l": [TENSOR, TENSOR, TENSOR]})
    assert nest([found[0], found[2]]) == {"l": {0: TENSOR, 2: TENSOR}}


def test_a_value_inside_another_is_an_error() -> None:
    with pytest.raises(Unsupported, match="inside another value"):
        nest([(("a",), 1), (("a", "b"), 2)])


def test_a_value_without_a_name_beside_others_is_an_error() -> None:
    with pytest.raises(Unsupported, match="a value without a name"):
        nest([((), 1), (("a",), 2)])
    assert nest([((), 1)]) == 1


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
