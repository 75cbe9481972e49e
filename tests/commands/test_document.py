"""The JSON of a report: derived from its Struct, in the words of the screen."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct, field

from ckptool.commands.document import document, plain
from ckptool.errors import Problem
from ckptool.render.data import print_json


class Grade(Enum):
    GOOD = "good"


class Inner(Struct, frozen=True):
    nbytes: int
    path: Path


class Report(Struct, frozen=True):
    computed: ClassVar = ("ok",)

    inner: tuple[Inner, ...]
    objects: int = field(default=3, name="totals.values")
    tensors: int = field(default=2, name="totals.tensors")
    left: int = field(default=1, name="rest")
    secret: object = field(default=None, name="_secret")

    @property
    def ok(self) -> bool:
        return False


def test_a_report_is_its_fields_under_their_keys() -> None:
    made = document("thing", Report((Inner(7, Path("/a")),)), more=Grade.GOOD)
    assert made == {
        "schema": "ckptool.thing/2",
        "inner": [{"bytes": 7, "path": "/a"}],
        "rest": 1,
        "totals": {"values": 3, "tensors": 2},
        "ok": False,
        "more": "good",
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, "inf"),
        (math.nan, "nan"),
        (0.5, 0.5),
        (Problem("gone", "file-missing"), "gone"),
        ({1: (True, None)}, {"1": [True, None]}),
    ],
)
def test_a_value_is_what_json_can_hold(value: object, expected: Any) -> None:
    assert plain(value) == expected
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected
    assert type(plain(value)) is type(expected)


TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)  # fmt: skip


@example({"\ud800": ["\udc00"]})
@given(st.dictionaries(TEXT, CONTENT))
def test_json_is_as_python_indents_it(content: dict[str, Any]) -> None:
    """Halves of surrogate pairs, too, which stand in names that were damaged."""
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_json(content)
    assert stream.getvalue() == json.dumps(content, indent=2) + "\n"


@pytest.mark.parametrize("rows", [2047, 2048, 2049, 6000])
def test_a_long_list_is_printed_in_pieces(rows: int) -> None:
    """Held whole, the text of a checkpoint of many tensors takes as much memory as they do."""
    content = {"a": [], "many": [{"name": f"n{n}", "shape": [n, []]} for n in range(rows)], "z": 1}
    pieces: list[str] = []
    stream = io.StringIO()
    stream.write = pieces.append  # type: ignore[method-assign, assignment]
    with redirect_stdout(stream):
        print_json(content)
    assert "".join(pieces) == json.dumps(content, indent=2) + "\n"
    assert max(piece.count("name") for piece in pieces) <= 2048
