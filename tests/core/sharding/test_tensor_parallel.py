"""Rules of tensor parallelism, and the boxes they make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.catalog import Extent
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.tensor_parallel import (
    RankCut,
    TpRule,
    fit_rank,
    fit_ranks,
    given_rules,
    merge_shards,
    parse_tp_rule,
)
from ckptool.core.views import whole_tensor
from ckptool.errors import Undetermined, UsageError


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("*.norm.weight=replicate", TpRule()),
        ("w=Replicate()", TpRule()),
        ("w=column", TpRule(0)),
        ("w=row", TpRule(1)),
        ("w=gated", TpRule(0, (1, 1))),
        ("w=Shard(2)", TpRule(2)),
        ("w=Shard(1, 4)", TpRule(1, (1, 1, 1, 1))),
        ("a=b*=row", TpRule(1)),
    ],
)
def test_rule(text: str, rule: TpRule) -> None:
    glob, found = parse_tp_rule(text)
    assert found == rule
    assert glob == text.rpartition("=")[0]


@pytest.mark.parametrize("text", ["", "w", "w=", "=row", "w=Shard(9)", "w=Shard(0,0)", "w=what"])
def test_what_is_not_a_rule(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tp_rule(text)


def test_the_first_rule_that_matches_wins() -> None:
    rules = (parse_tp_rule("*.bias=replicate"), parse_tp_rule("*=row"))
    names = ("a.bias", "a.weight")
    assert [*map(given_rules(rules, names), names)] == [TpRule(), TpRule(1)]
    assert [*map(given_rules(rules[:1], names), names)] == [TpRule(), None]


def test_a_rule_of_a_whole_name_is_for_that_one_only() -> None:
    names = ("norm.weight", "layers.0.norm.weight")
    assert [*map(given_rules([("norm.weight", TpRule(1))], names), names)] == [TpRule(1), None]
    assert [*map(given_rules([("norm", TpRule(1))], names), names)] == [TpRule(1)] * 2


def test_a_rule_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="none of 1 parameter"):
        given_rules((parse_tp_rule("b=row"),), ["a"])


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.data(),
)
def test_ranks_parts_make_the_whole(units: list[int], data: st.DataObject) -> None:
    """Cutting as Megatron does, block by block, and placing by the boxes gives the tensor back."""
    dim = data.draw(st.integers(0, len(units) - 1))
    degree = data.draw(st.integers(1, 4))
    blocks = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    shape, unit = list(units), units[dim] * degree
    shape[dim] = unit * sum(blocks)
    whole = np.arange(np.prod(shape)).reshape(shape)
    found = np.full(shape, -1)
    for index in range(degree):
        each = np.split(whole, np.cumsum(blocks)[:-1] * unit, dim)
        local = np.concatenate([np.split(block, degree, dim)[index] for block in each], dim)
        where = fit_rank(local.shape, [RankCut(dim, index, degree, blocks)])
        assert where.whole == tuple(shape)
        for there, here in where.pieces:
            found[spans(there)] = local[spans(here)]
    assert (found == whole).all()


def spans(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


def test_blocks_that_a_dim_does_not_have() -> None:
    with pytest.raises(Undetermined, match="no blocks of 1 : 1 along dim 0"):
        fit_rank((3, 4), [RankCut(0, 0, 2, (1, 1))])


def test_ranks_that_hold_the_same_part() -> None:
    """Four ranks share two key-value heads of three rows."""
    fits = fit_ranks([(3, 2)] * 4, TpRule(0, holders=2))
    assert [fit.pieces[0].box.lo[0] for fit in fits] == [0, 0, 3, 3]
    assert {fit.whole for fit in fits} == {(6, 2)}


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [
        ([(3, 2)] * 3, TpRule(0, holders=2)),
        ([(3, 2), (4, 2)], TpRule(0, holders=2)),
        ([(3, 2), (3, 3)], TpRule(0)),
        ([(3, 2), (4, 2)], TpRule()),
        ([(3, 2)] * 2, TpRule(2)),
        ([(3, 2)] * 2, TpRule(0, (1, 1))),
    ],
    ids=["odd holders", "unlike holders", "other dims", "unlike copies", "no dim", "no halves"],
)
def test_shards_that_a_rule_does_not_fit(shapes: list[tuple[int, ...]], rule: TpRule) -> None:
    with pytest.raises(Undetermined, match="does not fit"):
        fit_ranks(shapes, rule)


@pytest.mark.parametrize("rule", [TpRule(), TpRule(0), TpRule(1), TpRule(0, (1, 1))])
def test_a_tensor_without_elements_keeps_where_it_lies(rule: TpRule) -> None:
    shape = (0, 4) if rule.dim == 1 else (4, 0)
    shards = [
        whole_tensor("w", ("w",), BY_NAME["float32"], shape, Extent(f"{n}", 8, (4, 4)), n)
        for n in (0, 1)
    ]
    entry = merge_shards("w", ("w",), shards, fit_ranks([shape, shape], rule))
    assert entry.elements == 0
    places = {chunk.at.file for chunk in entry.chunks}
    assert places | {each.at.file for chunk in entry.chunks for each in chunk.copies} == {"0", "1"}


def test_an_empty_shard_adds_no_chunk_to_a_tensor_with_elements() -> None:
    shards = [
        whole_tensor("w", ("w",), BY_NAME["float32"], (n, 2), Extent("f", 8, (8, 4)), n)
        for n in (3, 0)
    ]
    entry = merge_shards("w", ("w",), shards, fit_ranks([(3, 2), (0, 2)], TpRule(0)))
    assert [chunk.box for chunk in entry.chunks] == [Box((0, 0), (3, 2))]
