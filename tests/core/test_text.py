"""The order of names, and patterns that files state."""

from __future__ import annotations

import re

import pytest

from ckptool.core.text import compile_stated, natural_key


def test_numbers_in_names_are_in_the_order_of_their_values() -> None:
    names = ["9", "10", "a", "a9", "a010", "a11", "a11b2", "a" + "9" * 5000, "b"]
    assert sorted({*names}, key=natural_key) == names


@pytest.mark.parametrize(
    "pattern",
    [
        "x{1000000000}",
        "((x{999}){999}){999}",
        f"x{{{'9' * 5000}}}",
        "(?x)x{ 3 }",
        "(?sx)x{3 0}",
        "[[:alpha:]]",
        "(x){e<=3}",
        "(" * 9999,
        "(",
    ],
)
def test_a_stated_pattern_that_fills_the_memory_or_means_two_things_is_none(pattern: str) -> None:
    with pytest.raises(re.error):
        compile_stated(pattern)


def test_a_stated_pattern_has_an_end() -> None:
    assert compile_stated(r"model\.layers\.\d{1,3}\.(?:up|gate)_proj").match(
        "model.layers.7.up_proj"
    )
    with pytest.raises(TimeoutError):
        compile_stated("(x|xx)+y").match("x" * 60, timeout=0.05)
