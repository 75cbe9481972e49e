"""Records that a pickle repeats, read at once, against the same read one by one."""

from __future__ import annotations

import gc
import io
import itertools
import pickle
import pickletools
import struct
import sys
import weakref
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serialization.pickle.pickled_instances import (
    HEAD,
    SHARED,
    Index,
    framed,
    instance,
    outcome,
    steps,
)

from ckptool.errors import Damaged
from ckptool.serialization.pickle import instances as pickle_instances
from ckptool.serialization.pickle import machine as pickle_machine
from ckptool.serialization.pickle import row_reader
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.pickle.machine import Machine
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.pickle.rows import Rows

torch = pytest.importorskip("torch")


class Info(Index):
    pass


class Made:
    """Pickled with a tuple for its state, as the properties of a tensor are."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __getstate__(self) -> tuple[Any, ...]:
        return self.state


INTEGERS = st.one_of(
    st.integers(0, 300), st.integers(-(2**33), 2**66), st.sampled_from([255, 256, 65535, 65536])
)


SIZES = st.lists(st.integers(0, 2**40), max_size=6).map(torch.Size)


VALUES = st.one_of(
    INTEGERS,
    st.none(),
    st.booleans(),
    st.text(max_size=300),
    st.text("ab_0.", max_size=20),
    SIZES,
    st.sampled_from(SHARED),
    st.just(()),
    st.just([1]),
)


ITEMS = INTEGERS | st.none() | st.booleans() | st.sampled_from(SHARED)


NESTED = st.one_of(
    st.lists(ITEMS | st.text(max_size=3), max_size=7).map(lambda state: Made(*state)),
    st.dictionaries(st.sampled_from("ab"), VALUES, min_size=1).map(lambda fields: [Info(fields)]),
    st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES}).map(Info), max_size=4),
    st.lists(st.builds(Index, st.dictionaries(st.sampled_from("ab"), VALUES)), max_size=2),
)


NAMES = st.lists(st.sampled_from(["fqn", "offset", "index", "more"]), unique=True, max_size=4)


@st.composite
def instances(draw: st.DrawFn) -> list[Any]:
    """Instances in a row, most of them with the same fields."""
    kinds = [(draw(st.sampled_from([Index, Info])), draw(NAMES)) for _ in range(2)]
    sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
    values = VALUES | st.sampled_from(sizes) | NESTED
    rows = draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=20))
    return [kind({name: draw(values) for name in names}) for kind, names in rows]


@given(instances(), instances(), st.sampled_from([2, 4, 5]), st.booleans())
def test_instances_in_a_row_are_as_one_by_one(
    rows: list[Any], more: list[Any], protocol: int, optimized: bool
) -> None:
    value = {
        "names": SHARED,
        "rows": rows,
        "table": dict(zip(rows, more, strict=False)),
        "end": rows,
    }
    data = pickle.dumps(value, protocol)
    data = pickletools.optimize(data) if optimized else data
    assert outcome(data) == outcome(data, at_once=False) == outcome(data, rows=True)


KINDS = [
    INTEGERS,
    st.just(None) | st.booleans(),
    st.text(max_size=60),
    st.sampled_from(SHARED),
    st.sampled_from(SHARED) | st.text("ab", max_size=20),
    SIZES,
    st.lists(st.integers(-9, 2**63), max_size=10).map(torch.Size),
]


@st.composite
def tables(draw: st.DrawFn) -> list[Any]:
    """Instances of one class, whose fields are each of one kind."""
    kind = draw(st.sampled_from([Index, Info]))
    names = draw(st.lists(st.sampled_from(["fqn", "offset", "index"]), min_size=1, unique=True))
    fields = {name: draw(st.sampled_from(KINDS)) for name in names}
    count = draw(st.integers(3, 40))
    return [kind({name: draw(of) for name, of in fields.items()}) for _ in range(count)]


@given(tables(), tables(), st.booleans())
def test_rows_are_as_one_by_one(keys: list[Any], values: list[Any], repeats: bool) -> None:
    pairs = [(key, value) for key, value in zip(keys, values, strict=False)]
    value = [SHARED, torch.Size([1]), keys, dict(pairs), values[::-1] if repeats else [], keys[:2]]
    data = pickle.dumps(value, 4)
    assert outcome(data, rows=True) == outcome(data, at_once=False)


def written(value: Any, frame: int, batch: int) -> bytes:
    """A pickle in frames of so many bytes and batches of so many items."""
    file = io.BytesIO()
    framer = vars(pickle)["_Framer"]
    with (
        mock.patch.object(framer, "_FRAME_SIZE_TARGET", frame),
        mock.patch.object(pickle._Pickler, "_BATCHSIZE", batch),
    ):
        pickle._Pickler(file, 4).dump(value)
    return file.getvalue()


@given(tables(), tables(), st.integers(4, 300), st.integers(2, 30), st.integers(60, 600))
def test_rows_across_frames_and_batches_are_as_one_by_one(
    keys: list[Any], values: list[Any], frame: int, batch: int, window: int
) -> None:
    pairs = [(key, value) for key, value in zip(keys, values, strict=False)]
    value = [SHARED[:9], torch.Size([1]), keys, dict(pairs), dict.fromkeys(keys, keys[0]), values]
    with mock.patch.multiple(row_reader, _FIRST_SIZE=window, _LARGEST_SIZE=window):
        for data in (written(value, frame, batch), written([value[1], dict(pairs)], frame, batch)):
            assert outcome(data, rows=True) == outcome(data, at_once=False)


@given(tables(), st.lists(st.integers(0, 1000), max_size=9), st.integers(-2, 2))
def test_a_frame_inside_an_opcode_is_a_part_of_its_argument(
    rows: list[Any], cuts: list[int], lie: int
) -> None:
    """Frames that begin anywhere, and end where they say, or not."""
    plain = pickle.dumps([SHARED[:9], torch.Size([1]), rows, rows[0]], 4)[
        11:
    ]  # one frame's opcodes
    at = sorted({0, len(plain), *(len(plain) - cut for cut in cuts if cut < len(plain))})
    frames = [plain[begin:end] for begin, end in itertools.pairwise(at)]
    sizes = [max(0, len(frame) + lie * (at == 1)) for at, frame in enumerate(frames)]
    data = b"\x80\x04" + b"".join(map(framed, frames, sizes))
    assert outcome(data, rows=True) == outcome(data, at_once=False)


def test_the_rows_of_many_frames_and_batches_are_few_columns() -> None:
    keys = [Index({"fqn": "".join([*f"layers.{n % 50}"]), "at": n}) for n in range(3000)]
    values = [Info({"path": SHARED[n % 9], "length": n}) for n in range(3000)]
    lists = [[Index({"at": n, "size": torch.Size([n, 4])}) for n in range(1500)] for _ in range(2)]
    table = dict(zip(keys, values, strict=True))
    data = pickle.dumps([SHARED, torch.Size([1]), table, *lists], 4)
    assert len(data) > 4 << 16
    _, _, *read = read_rows(data)
    assert [len(each) for each in read] == [4, 2, 1]
    assert [count_rows(each) // 100 for each in read] == [29, 14, 15]
    assert outcome(data, rows=True) == outcome(data, at_once=False)


@pytest.mark.parametrize("end", [b"et.", b"tt."])
def test_a_batch_in_many_windows_is_columns_if_it_ends(end: bytes) -> None:
    """Else its instances are read one by one, and the memo is as if no rows had been read."""
    texts = [b"\x8c\x03%03d\x94" % n for n in range(300)]
    again = b"".join(b"j" + struct.pack("<I", 9 + 3 * n) for n in range(300))
    rows = b"".join(map(instance, texts)) + instance(b"h\x0c") * 100
    data = HEAD + b"(](" + rows + end[:1] + again + end[1:] + b"." * 40
    with mock.patch.multiple(row_reader, LEAST=9, _FIRST_SIZE=999, _LARGEST_SIZE=999):
        value: Any = read_pickle(data, what="p", rows=True).value
        columns = [len(rows) for rows in value[0] if type(rows) is Rows]
        assert (sum(columns) > 390 and len(columns) > 5) is (end == b"et.")
        assert outcome(data, rows=True) == outcome(data, at_once=False)


def read_rows(data: bytes) -> list[Any]:
    """The items of a pickled list; those that are alike in columns."""
    value: Any = read_pickle(data, what="p", rows=True).value
    return [*value]


def count_rows(value: Any) -> int:
    """How many instances are in columns, of a list or of a dict's keys."""
    return sum(len(item) for item in value if type(item) is Rows)


def test_the_rows_of_a_large_table_are_columns() -> None:
    keys = [
        Index(
            {
                "fqn": f"layers.{n % 50}",
                "index": n,
                "offset": torch.Size([n << n % 40] * (1 + n % 3)),
            }
        )
        for n in range(5000)
    ]
    values = [Info({"path": f"__{n // 1000}", "offset": n**4, "length": n}) for n in range(5000)]
    data = pickle.dumps([torch.Size([1]), keys[::-1], dict(zip(keys, values, strict=True))], 4)
    _, alone, table = read_rows(data)
    assert count_rows(alone) > 4500
    assert count_rows(table) == 0  # its keys are records already
    data = pickle.dumps([torch.Size([1]), dict(zip(keys, values, strict=True)), values], 4)
    _, table, _ = read_rows(data)
    assert count_rows(table) > 4500
    assert outcome(data, rows=True) == outcome(data, at_once=False)


@pytest.mark.parametrize("many", [False, True])
def test_many_rows_alone_are_read_at_once_also_by_a_program_that_has_numpy(
    many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run that it began goes on in a process that has not: both make the same plan."""
    rows = [Index({"fqn": f"layers.{n % 50}", "index": n}) for n in range(5000 if many else 1000)]
    data = pickle.dumps(rows, 4)  # in frames of fewer rows
    assert count_rows(read_rows(data))
    monkeypatch.setattr(pickle_instances, "_WORTH_NUMPY", 1 << 11)
    assert "numpy" in sys.modules
    assert bool(count_rows(read_rows(data))) is many


@pytest.mark.parametrize("change", [b"h\x21Nb", b"h\x20(h\x03Nu", b"h\x20h\x03Ns"])
def test_a_row_is_never_changed(change: bytes) -> None:
    data = HEAD + b"](" + instance(b"K\x01") * 200 + b"e"
    assert read_pickle(data + b".", what="p", rows=True)
    with pytest.raises(Damaged, match="many instances that is changed"):
        read_pickle(data + change + b".", what="p", rows=True)


@pytest.mark.parametrize(
    "end", [b"0e.", b"\x85.", b"\x87.", b"t.", b"(e.", b"Nb.", b"2e.", b"\x90."]
)
def test_rows_are_instances_to_other_opcodes(end: bytes) -> None:
    for start in (b"](", b"(", b"\x8f("):
        data = HEAD + start + instance(b"K\x01") * 9 + end
        assert outcome(data, rows=True) == outcome(data, at_once=False)


@given(instances(), st.data())
def test_changed_instances_are_as_one_by_one(rows: list[Any], data: st.DataObject) -> None:
    changed = bytearray(pickle.dumps([SHARED[:3], rows, rows[::-1]], 4))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(len(changed) // 4, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255) | st.sampled_from(b"hjq\x94K(u\x85"))
    one_by_one = outcome(bytes(changed), at_once=False)
    assert outcome(bytes(changed)) == one_by_one == outcome(bytes(changed), rows=True)


def test_a_small_pickle_is_read_by_its_opcodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps([Index({"at": n}) for n in range(200)], 4)
    assert Machine(data, 0, "p")._reader is not None
    monkeypatch.setattr(pickle_machine, "_LEAST_REPEATED", len(data) + 1)
    assert Machine(data, 0, "p")._reader is None
    assert outcome(data, rows=True) == outcome(data, at_once=False)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda n: 1 << (n % 60), id="integers of every length"),
        pytest.param(lambda n: f"__{n}_0.distcp", id="short text"),
        pytest.param(lambda n: torch.Size([n, 300, 1 << 17]), id="sizes"),
        pytest.param(lambda n: torch.Size([n, 1, 2, 3, 4]), id="sizes of many dims"),
        pytest.param(lambda n: None if n % 2 else n % 3 == 0, id="none and truth"),
        pytest.param(lambda n: SHARED[n], id="what the memo has"),
        pytest.param(lambda n: Made(SHARED[n], None, n, True), id="an object with a tuple"),
        pytest.param(
            lambda n: [Info({"fqn": torch.Size([n, 1]), "more": n})], id="a list of an instance"
        ),
        pytest.param(
            lambda n: [Info({"fqn": at, "more": f"{n}"}) for at in range(2 + n % 15)],
            id="a list of a few",
        ),
    ],
)
def test_all_but_the_first_instance_are_read_at_once(value: Any) -> None:
    rows = [Index({"fqn": value(number), "more": None}) for number in range(300)]
    data = pickle.dumps([SHARED, torch.Size([0]), rows], 4)
    assert steps(data) >= 295
    assert outcome(data) == outcome(data, at_once=False) == outcome(data, rows=True)


def alike(count: int) -> bytes:
    """A pickle of equal instances, each with a list of its own."""
    rows = [
        Index({"a": [Info({"b": 1, "c": 2}), Info({"b": 1, "c": 2})], "d": 3}) for _ in range(count)
    ]
    return pickle.dumps([Info({}), *rows], 4)


def test_equal_instances_with_lists_are_made_once() -> None:
    value: Any = read_pickle(alike(9), what="p").value
    assert len({*map(id, value)}) <= 4
    assert outcome(alike(9)) == outcome(alike(9), at_once=False)


@pytest.mark.parametrize("change", [b"Nb", b"(h\x06Nu"])
def test_an_instance_that_others_share_is_never_changed(change: bytes) -> None:
    opcodes = alike(9)[11:].removesuffix(b"e.") + change + b"e."
    with pytest.raises(Damaged, match="many instances that is changed"):
        read_pickle(b"\x80\4" + framed(opcodes, len(opcodes)), what="p")


def test_what_reads_instances_goes_with_its_last_user() -> None:
    """Without a collection of garbage, which commands do without: it holds all that was read."""
    data = pickle.dumps([Info({"a": [Info({"a": n, "b": 1})], "b": n}) for n in range(9)], 4)
    machine = Machine(data, 0, "p")
    machine.run()
    assert machine._reader is not None
    reader = weakref.ref(machine._reader)
    gc.disable()
    try:
        del machine
        assert reader() is None
    finally:
        gc.enable()


def test_a_look_at_what_would_be_appended_appends_nothing() -> None:
    record = Call(Global("argparse", "Namespace"), (), state={"lr": 1})
    assert (record.items, record.entries) == ([], [])
    assert not record.is_filled
    record.items.append(2)
    assert record.is_filled
