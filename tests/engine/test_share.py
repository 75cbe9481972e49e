"""Shares: each item has one owner, neighbors are together, and nobody has much more than others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptool.engine.share import Share

SIZES = st.lists(st.integers(0, 1000), max_size=60)


def shares(sizes: list[int], count: int) -> list[list[int]]:
    return [Share(at, count).takes(sizes) for at in range(count)]


def loads(sizes: list[int], count: int) -> list[int]:
    return [sum(sizes[at] for at in share) for share in shares(sizes, count)]


@given(SIZES, st.integers(1, 70))
def test_each_item_is_one_owner_s(sizes: list[int], count: int) -> None:
    assert sorted(at for share in shares(sizes, count) for at in share) == [*range(len(sizes))]


@given(SIZES, st.integers(1, 70))
def test_nobody_has_much_more_than_an_even_share(sizes: list[int], count: int) -> None:
    even, largest = sum(sizes) / count, max(sizes, default=0)
    assert max(loads(sizes, count)) <= 1.05 * (even + largest)


def test_items_of_one_size_are_shared_with_their_neighbors() -> None:
    assert shares([7] * 8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shares([7] * 5, 2) == [[0, 1], [2, 3, 4]]
    assert shares([7] * 3, 3) == [[0], [1], [2]]


def test_items_of_different_sizes_are_balanced() -> None:
    assert max(loads([100, 1, 1, 100, 1, 1], 2)) <= 103
    assert max(loads([50, 100, 50, 1], 2)) == 101


def test_the_first_shares_have_items_if_there_are_few() -> None:
    assert shares([5, 5], 4) == [[0], [1], [], []]


def test_items_without_bytes_are_the_first_owner_s() -> None:
    assert shares([0, 0, 0], 2) == [[0, 1, 2], []]
