"""The JSON of a report: derived from its Struct, in the words of the screen."""

from __future__ import annotations

import json
import math
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import Struct, field

from ckptool.commands.document import document, plain
from ckptool.errors import Problem


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
