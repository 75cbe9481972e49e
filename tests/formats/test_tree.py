"""Flattening and nesting state dicts, with DCP's own flattening as the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.catalog import Index, flat_name
from ckptool.errors import CannotDo, Damaged
from ckptool.formats._pickle import Call, Global
from ckptool.formats._tree import holed_lists, leaves, nest, unique_names

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


def test_two_paths_of_one_name_are_an_error() -> None:
    with pytest.raises(CannotDo, match=r"two values are called 'a\.b'"):
        unique_names(leaves({"a": {"b": 1}, "a.b": 2}, what="test"), what="test")


def test_a_dict_that_holds_itself_has_no_end() -> None:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    with pytest.raises(Damaged, match="nested"):
        list(leaves(tree, what="test"))


def test_a_list_with_a_hole_becomes_a_dict() -> None:
    found = list(leaves({"l": [TENSOR, TENSOR, TENSOR]}, what="test"))
    assert nest([found[0], found[2]]) == {"l": {0: TENSOR, 2: TENSOR}}


def test_a_value_inside_another_is_an_error() -> None:
    with pytest.raises(CannotDo, match="inside another value"):
        nest([(("a",), 1), (("a", "b"), 2)])


def test_a_list_with_a_hole_is_told_from_a_whole_one() -> None:
    whole = [("a", Index(0)), ("a", Index(1), "x")]
    assert holed_lists(whole) == set()
    assert holed_lists([*whole, ("b", Index(1)), ("a", Index(1), "y", Index(2))]) == {
        ("b",),
        ("a", Index(1), "y"),
    }
