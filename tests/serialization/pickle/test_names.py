"""What a pickle does with the classes it names: fields set, members reached, or calls."""

from __future__ import annotations

import pickle
import sys
import types
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.verify.codes import Severity
from ckptool.errors import Hostile
from ckptool.serialization.pickle.load import find_globals, read_pickle
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.pickle.write import dump

LIB = "somebodys_trainer.storage"


@pytest.fixture
def lib() -> Iterator[types.ModuleType]:
    """A package of somebody's trainer, with data classes, that ckptool does not know."""
    names = [LIB.partition(".")[0], LIB]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    yield sys.modules[LIB]
    for name in names:
        del sys.modules[name]


def put(lib: types.ModuleType, cls: Any) -> Any:
    cls.__module__, cls.__qualname__ = LIB, cls.__name__
    setattr(lib, cls.__name__, cls)
    return cls


@dataclass
class _Info:
    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Slotted:
    rank: int
    name: str


Pair = namedtuple("Pair", "low high")


class Text(str):
    pass


class Tree(dict[str, Any]):
    pass


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_instances_that_only_carry_fields_are_records(lib: types.ModuleType, protocol: int) -> None:
    classes = [put(lib, cls) for cls in (_Info, Slotted, Pair, Text, Tree)]
    info, slotted, pair, text, tree = classes
    value = [info("a", n, 2) for n in range(300)]
    value += [slotted(1, "x"), pair(1, 2), text("t"), tree(a=info("b", 0, 0))]
    named = find_globals(pickle.dumps(value, protocol))
    assert named.records == {Global(LIB, cls.__name__) for cls in classes}


CALLED = {
    "a call": b.call(b.glob(LIB, "Info")),
    "a call of what is also a record": b.new(b.glob(LIB, "Info"), b.dct())
    + b"0"
    + b.call(b.glob(LIB, "Info"), b.number(1)),
    "a function": b.new(b.glob(LIB, "run"), b.dct()),
    "only a name": b.glob(LIB, "Info"),
    "passed to a partial": b.new(b.glob(LIB, "Info"), b.dct())
    + b"0"
    + b.call(b.glob("functools", "partial"), b.glob(LIB, "Info")),
    "in two pickles, of which the second calls it": b.new(b.glob(LIB, "Info"), b.dct())
    + b"."
    + b.call(b.glob(LIB, "Info")),
}


@pytest.mark.parametrize("body", CALLED.values(), ids=CALLED)
def test_what_may_be_called_is_no_record(body: bytes) -> None:
    named = find_globals(body + b".", pickles=1 + body.count(b"."))
    assert Global(LIB, "Info") not in named.records
    assert Global(LIB, "run") not in named.records


def test_records_of_a_trainers_own_in_metadata_are_no_finding(
    lib: types.ModuleType, tmp_path: Path
) -> None:
    """As OLMo-core 3.0 replaces each ``_StorageInfo`` of torch, and others add fields."""
    info, slotted = put(lib, _Info), put(lib, Slotted)
    dcp.save({"w": torch.ones(4), "v": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_data = {
        key: info(each.relative_path, each.offset, each.length)
        for key, each in metadata.storage_data.items()
    }
    metadata.storage_meta.extra = [slotted(0, "x")]
    metadata.planner_data = {**metadata.planner_data, "trainer": slotted(1, "y")}
    file.write_bytes(pickle.dumps(metadata))
    report = ckptool.verify(tmp_path)
    assert report.ok
    assert report.findings == ()


def test_a_call_in_metadata_is_still_an_error(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / ".metadata"
    file.write_bytes(
        file.read_bytes()[:-1] + b"(" + b.call(b.glob(LIB, "Info"), b.number(1)) + b"1."
    )
    assert [f.code for f in ckptool.verify(tmp_path).findings] == ["unknown-callable"]


def test_a_record_beside_the_model_is_a_warning(lib: types.ModuleType, tmp_path: Path) -> None:
    config = put(lib, Slotted)(3, "graft")
    torch.save({"w": torch.ones(2), "config": config}, tmp_path / "a.pt")
    found = {f.code: f.severity for f in ckptool.verify(tmp_path / "a.pt").findings}
    assert found["unknown-global"] is Severity.WARNING
    assert "unknown-callable" not in found


# Members of classes

BUFFER = ("mmengine.logging.history_buffer", "HistoryBuffer")
GETATTR = b.glob("builtins", "getattr")


def member(name: str = "mean", owner: tuple[str, str] = BUFFER) -> bytes:
    return b.call(GETATTR, b.glob(*owner), b.text(name))


SOUND = {
    "mmengine 0.10": b.new(b.glob(*BUFFER), b.dct(m=b.dct(mean=member(), min=member("min")))),
    "an enumeration of Python 3.11.1": b.dct(
        a=member("encoder_or_decoder", ("megatron.core.enums", "ModelType"))
    ),
    "protocol 4": b.lst(b.stack_glob(BUFFER[0], "HistoryBuffer.mean")),
    "of Python 2": b.call(b.glob("__builtin__", "getattr"), b.glob(*BUFFER), b.text("max")),
}


@pytest.mark.parametrize("body", SOUND.values(), ids=SOUND)
def test_a_member_that_nothing_calls_is_a_record(body: bytes) -> None:
    value: Any = read_pickle(body + b".", what="a").value
    again, _ = dump(value)
    assert isinstance(read_pickle(again, what="b").value, type(value))
    while not isinstance(value, Call) or value.is_new:
        value = value.fields if isinstance(value, Call) else value
        value = next(iter(value.values())) if isinstance(value, dict) else value
        value = value[0] if isinstance(value, list) else value
    assert value.function == Global("builtins", "getattr")


PARTIAL, RETYPED = b.glob("functools", "partial"), b.glob("torch._tensor", "_rebuild_from_type_v2")
NO_MEMBERS = {
    "called": b.call(member(), b.number(1)),
    "called by its dotted name": b.call(b.stack_glob(BUFFER[0], "HistoryBuffer.mean")),
    "made into an object": member() + b")\x81",
    "passed to a function": b.call(PARTIAL, member()),
    "passed in a list": b.call(
        RETYPED, RETYPED, b.glob(*BUFFER), b.tup(b.lst(member()), b.glob(*BUFFER)), b"N"
    ),
    "called by a partial whose state has it": b.call(
        b.call(PARTIAL, b.glob("torch", "Size")) + b.tup(member(), b.tup(), b.dct(), b"N") + b"b"
    ),
    "hidden": b.lst(member("_statistics_methods")),
    "a dunder": b.lst(member("__init__")),
    "dotted": b.lst(member("mean.__globals__")),
    "of a dotted class": b.lst(b.stack_glob(BUFFER[0], "HistoryBuffer.mean.__globals__")),
    "of a function": b.lst(member("system", ("torch.serialization", "os"))),
    "of code": b.lst(member("run", ("subprocess", "Popen"))),
    "of a class of an unknown package": b.lst(member("run", (LIB, "Info"))),
    "of a member": b.lst(b.call(GETATTR, member(), b.text("mean"))),
    "of an object": b.lst(b.call(GETATTR, b.new(b.glob(*BUFFER), b.dct()), b.text("mean"))),
    "without a name": b.lst(b.call(GETATTR, b.glob(*BUFFER))),
}


@pytest.mark.parametrize("body", NO_MEMBERS.values(), ids=NO_MEMBERS)
def test_any_other_getattr_is_hostile(body: bytes) -> None:
    with pytest.raises(Hostile, match=r"getattr|attribute|can run code"):
        read_pickle(body + b".", what="a")


def test_a_run_of_such_steps_has_a_good_one(lib: types.ModuleType, tmp_path: Path) -> None:
    """OLMo-core's trainer saves ``train/`` first and ``.metadata.json`` last; its functions not."""
    info = put(lib, _Info)
    for step in (10, 20):
        folder = tmp_path / f"step{step}" / "model_and_optim"
        dcp.save({"w": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        stored = metadata.storage_data.items()
        metadata.storage_data = {k: info(v.relative_path, v.offset, v.length) for k, v in stored}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    command = ["verify", str(tmp_path), "--latest-good"]
    assert CliRunner().invoke(app, command).stdout.strip().endswith("step20")
    (tmp_path / "step20" / "train").mkdir()
    torch.save({"step": 20}, tmp_path / "step20" / "train" / "rank0.pt")
    assert CliRunner().invoke(app, command).stdout.strip().endswith("step10")
