"""The expanded size of values, however often they refer to their parts."""

from __future__ import annotations

import pytest

from ckptool.errors import Damaged
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.state_dict.values import Expansion, require_bounded

DOUBLINGS = 20_000
"""So many that the number of parts, written out, would have more digits than Python shows."""


def doubled(times: int) -> Call:
    """A record that refers twice to one that refers twice to one, and so on."""
    record = Call(Global("some", "Class"), ())
    for _ in range(times):
        record = Call(Global("some", "Class"), (record, record))
    return record


def test_what_doubles_without_end_is_a_bomb_of_few_digits() -> None:
    with pytest.raises(Damaged, match="expand to more than 1,000,000,000,000,000") as caught:
        require_bounded([doubled(DOUBLINGS)], what="f.pt")
    assert caught.value.message.code == "pickle-bomb"
    assert len(str(caught.value)) < 200


def test_sizes_stay_small_numbers() -> None:
    expansion, value = Expansion(), doubled(DOUBLINGS)
    size = expansion.parts([value, value])
    assert size.bit_length() < 64
    assert not expansion.is_bounded(size)


def test_few_doublings_are_counted_exactly_and_are_not_bomb() -> None:
    value: list[object] = [0]
    for _ in range(3):
        value = [value, value]
    assert Expansion().parts(value) == 1 + 2 + 4 + 8 + 8
    require_bounded([value], what="f.pt")
