"""The content of objects is shown as data, and none of their classes is imported or called."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import inspect_one
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.render.inspect.values import notable_values, preview
from ckptool.serialization.pickle.records import Call, Global


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    names: tuple[str, ...] = ("a", "b")


class Mode(enum.Enum):
    FAST = "fast"


PARIS = datetime.timezone(datetime.timedelta(hours=2))
VALUES: dict[str, tuple[Any, str, Any]] = {
    "space": (
        argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("/a/b")),
        "Namespace(lr=0.1, out='/a/b')",
        {"$type": "argparse.Namespace", "lr": 0.1, "out": "/a/b"},
    ),
    "config": (
        Config(),
        "Config(lr=0.1, names=('a', 'b'))",
        {"$type": f"{__name__}.Config", "lr": 0.1, "names": ["a", "b"]},
    ),
    "mode": (Mode.FAST, "Mode('fast')", {"$type": f"{__name__}.Mode", "$args": ["fast"]}),
    "when": (
        datetime.datetime(2024, 5, 6, 7, 8, 9, 123, PARIS),
        "2024-05-06 07:08:09.000123+02:00",
        "2024-05-06 07:08:09.000123+02:00",
    ),
    "day": (datetime.date(2024, 5, 6), "2024-05-06", "2024-05-06"),
    "time": (datetime.time(1, 2, 3), "01:02:03", "01:02:03"),
    "delta": (datetime.timedelta(days=1, seconds=5), "1 day, 0:00:05", "1 day, 0:00:05"),
    "path": (pathlib.PurePosixPath("x/y"), "'x/y'", "x/y"),
    "decimal": (decimal.Decimal("1.50"), "'1.50'", "1.50"),
    "float": (np.float64(0.5), "0.5", 0.5),
    "big": (np.array(7, ">i4")[()], "7", 7),
    "flag": (np.bool_(True), "True", True),
    "text": (np.str_("hi"), "'hi'", "hi"),
    "nptime": (np.datetime64("2024-05-06"), "'2024-05-06'", "2024-05-06"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values") / "v.pt"
    torch.save({"w": torch.ones(1)} | {name: value for name, (value, *_) in VALUES.items()}, path)
    return path


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_shown(name: str, saved: Path) -> None:
    assert preview(inspect_one(saved).catalog.objects[name].value) == VALUES[name][1]


def test_json_has_what_the_values_hold(saved: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(saved), "--json"])
    found = {value["name"]: value for value in json.loads(done.stdout)["values"]}
    contents = {n: value.get("content", value.get("value")) for n, value in found.items()}
    assert contents == {name: content for name, (_, _, content) in VALUES.items()}


def test_attributes_are_listed_one_by_one(saved: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(saved), "--values"]).stdout
    rows = {words[0]: words[1:] for words in map(str.split, shown.splitlines())}
    assert rows["space"] == ["argparse.Namespace", "2", "attributes"]
    assert rows["space.lr"] == ["float", "0.1"]
    assert rows["config.names"] == ["tuple", "('a',", "'b')"]


def test_what_people_look_for_comes_first(tmp_path: Path) -> None:
    held = {
        "scheduler": {"_is_initial": False, "last_epoch": 7},
        "version": "1.2",
        "args": argparse.Namespace(seed=3, hidden_size=64, verbose=True, out="x"),
        "lr": 0.1,
        "step": 1000,
    }
    torch.save({"w": torch.ones(1), **held}, tmp_path / "v.pt")
    entries = inspect_one(tmp_path / "v.pt").catalog.objects.values()
    first = ["step", "lr", "args.seed", "args.hidden_size"]
    rest = ["version", "scheduler.last_epoch"]
    assert [name for name, _ in notable_values(entries)] == [*first, *rest]
    assert [name for name, _ in notable_values(entries, 2)] == first[:2]


def record(module: str, name: str, *args: Any, state: Any = None) -> Call:
    return Call(Global(module, name), args, state=state)


@pytest.mark.parametrize(
    "odd",
    [
        record("datetime", "datetime", b"\x07"),
        record("datetime", "datetime", b"\xff" * 10),
        record("datetime", "date", "no bytes"),
        record("datetime", "timedelta", 1 << 80),
        record("datetime", "datetime", b"\x07\xe8\x05\x06" + bytes(6), record("evil", "zone")),
        record("numpy._core.multiarray", "scalar", 1),
        record("numpy._core.multiarray", "scalar", record("numpy", "dtype", "f8"), b"short"),
        record("numpy._core.multiarray", "scalar", record("numpy", "dtype", "O8"), b"x" * 8),
        record("numpy._core.multiarray", "scalar", record("numpy", "dtype", "f8,"), b"x" * 8),
    ],
    ids=range(9),
)
def test_records_that_contradict_themselves_are_called_by_their_names(odd: Call) -> None:
    shown = preview(odd)
    assert shown.startswith("<") or "(" in shown


def test_a_record_that_holds_itself_ends() -> None:
    loop = record("a", "Loop", state={})
    loop.state["self"] = loop
    wide = record("a", "Wide", state={f"k{i}": loop for i in range(1000)})
    assert len(preview(wide)) < 1000
    assert "Loop(" in preview(loop)


def test_names_of_records_are_escaped() -> None:
    shown = preview(record("a", "B\x1b[31m", state={"k\n": "v\u202e"}))
    assert shown.isprintable()
