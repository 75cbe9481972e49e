"""The order of names."""

from __future__ import annotations

from ckptool.core.text import natural_key


def test_numbers_in_names_are_in_the_order_of_their_values() -> None:
    names = ["9", "10", "a", "a9", "a010", "a11", "a11b2", "a" + "9" * 5000, "b"]
    assert sorted({*names}, key=natural_key) == names
