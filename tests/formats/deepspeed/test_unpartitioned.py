"""Names of numbered parameters: found where there is one answer, and only there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.formats.deepspeed.unpartitioned import name_by_order

MODEL = [("w1", (4, 3)), ("b1", (4,)), ("w2", (3, 4)), ("b2", (3,)), ("norm", (3,))]


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([[(4, 3), (4,), (3, 4), (3,), (3,)]], [["w1", "b1", "w2", "b2", "norm"]]),
        ([[(4, 3), (3, 4)], [(4,), (3,), (3,)]], [["w1", "w2"], ["b1", "b2", "norm"]]),
        ([[None, None, None, None, None]], [["w1", "b1", "w2", "b2", "norm"]]),
        ([[(3, 4)]], [["w2"]]),
        ([[(4, 3), (4,)], []], [["w1", "b1"], []]),
    ],
    ids=["all", "two groups", "no shapes", "the rest is frozen", "an empty group"],
)
def test_one_answer(groups, names) -> None:
    assert name_by_order(MODEL, groups) == names


@pytest.mark.parametrize(
    "groups",
    [[[(3,)]], [[(3,)], [(3,)]], [[(4,), (4, 3)]], [[(9, 9)]], [[(4, 3)] * 6]],
    ids=["two fit", "groups may be exchanged", "another order", "none fits", "too many"],
)
def test_no_answer_or_several(groups) -> None:
    assert name_by_order(MODEL, groups) is None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_an_answer_is_never_wrong(kinds: list[int], data: st.DataObject) -> None:
    names = [(str(number), (kind,)) for number, kind in enumerate(kinds)]
    owner = [data.draw(st.sampled_from([None, 0, 1])) for _ in names]
    groups = [[name for name, own in zip(names, owner, strict=True) if own == g] for g in (0, 1)]
    found = name_by_order(names, [[shape for _, shape in group] for group in groups])
    assert found is None or found == [[name for name, _ in group] for group in groups]


def test_many_layers_alike_are_distinguished_by_their_number() -> None:
    names = [(f"{layer}.w", (4, 4)) for layer in range(2000)]
    found = name_by_order(names, [[(4, 4)] * 2000])
    assert found == [[name for name, _ in names]]
