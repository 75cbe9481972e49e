"""Rules of tensor parallelism, and the boxes they make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.sharding.tensor_parallel import (
    Cut,
    TpRule,
    fit,
    named_rule,
    parse_tp_rule,
    require_matched,
)
from ckptool.errors import UsageError


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
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tp_rule(text)


def test_the_first_rule_that_matches_wins() -> None:
    rules = (parse_tp_rule("*.bias=replicate"), parse_tp_rule("*=row"))
    assert named_rule(rules, "a.bias") == TpRule()
    assert named_rule(rules, "a.weight") == TpRule(1)
    assert named_rule(rules[:1], "a.weight") is None


def test_a_rule_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="none of the 1 parameters"):
        require_matched((parse_tp_rule("b=row"),), ["a"])


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
        where = fit(local.shape, [Cut(dim, index, degree, blocks)])
        assert where.whole == tuple(shape)
        for here, there in where.pieces:
            found[spans(there)] = local[spans(here)]
    assert (found == whole).all()


def spans(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


def test_blocks_that_a_dim_does_not_have() -> None:
    with pytest.raises(ValueError, match="no blocks of 1 : 1 along dim 0"):
        fit((3, 4), [Cut(0, 0, 2, (1, 1))])
