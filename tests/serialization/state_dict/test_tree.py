"""Flattening and nesting state dicts, with DCP's own flattening as the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.catalog import flat_name
from ckptool.errors import Damaged, Unsupported
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.state_dict.tree import leaves, nest, unique_names
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
    assert nest(leaves(tree, what="test")) == tree


@given(TREES, st.randoms(use_true_random=False))
def test_nesting_does_not_depend_on_the_order(tree: dict[Any, Any], random: Any) -> None:
    found = list(leaves(tree, what="test"))
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
    ours = {flat_name(path): leaf for path, leaf in leaves(state, what="test")}
    assert {name for name, leaf in ours.items() if leaf != {}} == theirs


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
    assert [flat_name(path) for path, _ in leaves(value, what="test")] == names


COLLIDING = {"a": {"b": 1, "c": {"d": 2}}, "a.b": 3, "a.c": {"d": 4}, 1: 5, "1": 6, "1@2": 7}


@pytest.mark.parametrize("backwards", [False, True])
def test_paths_of_one_name_get_names_of_their_own_in_any_order(backwards: bool) -> None:
    found = list(leaves(COLLIDING, what="test"))
    named = unique_names(found[::-1] if backwards else found)
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
    tree["deep"] = inner = {"list": [tree, {"x": 1}]}
    inner["up"] = inner
    found = {flat_name(path): leaf for path, leaf in leaves(tree, what="test")}
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
    assert {flat_name(path) for path, _ in leaves(tree, what="test")} == {"a.w", "b.0.w", "b.1.w"}


def test_what_unfolds_without_end_is_a_bomb() -> None:
    tree: dict[str, Any] = {"x": 1}
    for _ in range(40):
        tree = {"a": tree, "b": tree}
    with pytest.raises(Damaged, match="nested"):
        list(leaves(tree, what="test"))


def test_a_list_with_a_hole_becomes_a_dict() -> None:
    found = list(leaves({"l": [TENSOR, TENSOR, TENSOR]}, what="test"))
    assert nest([found[0], found[2]]) == {"l": {0: TENSOR, 2: TENSOR}}


def test_a_value_inside_another_is_an_error() -> None:
    with pytest.raises(Unsupported, match="inside another value"):
        nest([(("a",), 1), (("a", "b"), 2)])


def test_a_value_without_a_name_beside_others_is_an_error() -> None:
    with pytest.raises(Unsupported, match="a value without a name"):
        nest([((), 1), (("a",), 2)])
    assert nest([((), 1)]) == 1
