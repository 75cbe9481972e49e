"""Programs that nearly repeat a record: left to the opcodes, one by one."""

from __future__ import annotations

import pickle
from operator import add
from unittest import mock

import pytest
from hypothesis import example, given
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
from ckptool.serialization.pickle import row_reader
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.pickle.memo import Memo
from ckptool.serialization.pickle.row_reader import RowReader

torch = pytest.importorskip("torch")


SIZE, SIZED = b"h\x06", b"\x94\x85\x94R\x94"


EVERY_NUMBER = [byte for number in range(22) for byte in (ord("h"), number)]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(instance(b"K\x01") * 3 + b"N\x95", id="cut"),
        pytest.param(instance(b"K\x01") * 2 + b"Nq\x020" + instance(b"K\x02") + b".", id="renamed"),
        pytest.param(instance(b"h\x03") * 2 + b"Nq\x030" + instance(b"h\x03") + b".", id="filled"),
        pytest.param(instance(b"h\x09") * 2 + b".", id="nothing noted"),
        pytest.param(instance(b"h\x08") * 3 + b".", id="its own dict"),
        pytest.param(instance(b"\x8c\x02a\x94") * 2 + b".", id="text of another length"),
        pytest.param(instance(SIZE + b"K\x01K\x02\x85" + SIZED) * 2 + b".", id="one size too many"),
        pytest.param(instance(SIZE + b"K\x01\x86" + SIZED) * 2 + b".", id="one size too few"),
        pytest.param(instance(b"h\x02K\x01\x85" + SIZED) * 2 + b".", id="no size"),
        pytest.param(b"Nr\0\1\0\x000" + instance(b"K\x01") * 3 + b".", id="a gap in the memo"),
        pytest.param(
            instance(SIZE + b"K\x01\x85" + SIZED) * 3 + b"(" + bytes(EVERY_NUMBER) + b"t.",
            id="every number of the memo",
        ),
        pytest.param(b"h\x03)\x81\x94}\x94(h\x03K\x01ub" * 2 + b".", id="no class"),
        pytest.param(b"h\x02)\x81\x94}\x94(h\x06K\x01ub" * 2 + b".", id="no name"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_left_to_the_opcodes(program: bytes) -> None:
    one_by_one = outcome(HEAD + program, at_once=False)
    assert outcome(HEAD + program) == one_by_one == outcome(HEAD + program, rows=True)


LEAST_INTEGER = b"\x8a\x08" + (-(2**63)).to_bytes(8, "little", signed=True)


NUMBERED = [instance(b"K" + bytes([number])) for number in range(8)]


OTHERS = [row.replace(b"h\x02", b"h\x08", 1) for row in NUMBERED]
"""Of a class that is noted as 8."""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"](" + instance(LEAST_INTEGER) * 9 + b"e.", id="the least integer"),
        pytest.param(
            b"](" + instance(b"\x8c\x01a\x94h\x03K\x01") * 9 + b"h\x0fh\x10h\x12e.",
            id="a field twice",
        ),
        pytest.param(b"](" + b"".join(NUMBERED) + b"\x94h\x17e.", id="the last one noted"),
        pytest.param(b"](" + b"".join(NUMBERED) + b"r\x17\0\0\0h\x17e.", id="noted by number"),
        pytest.param(b"}(" + b"".join(NUMBERED) + b"u.", id="keys and values of a class"),
        pytest.param(
            b"\x8c\x01D\x940h\x04h\x07\x93\x94}(" + b"".join([*NUMBERED[:4], *OTHERS[:4]]) + b"u.",
            id="keys and values of a class, then of another",
        ),
        pytest.param(
            b"(](" + instance(b"h\x04") * 4 + b"eNq\x040](" + instance(b"h\x04") * 4 + b"et.",
            id="the same, of what is noted anew",
        ),
        pytest.param(
            b"}(" + (b"".join(NUMBERED[:3]) + b"u(") * 2 + b"u.", id="batches that end after a key"
        ),
    ],
)
def test_rows_of_odd_programs_are_as_one_by_one(
    program: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "_FIRST_SIZE", 80)  # about five rows
    monkeypatch.setattr(row_reader, "_LARGEST_SIZE", 80)
    data = HEAD + program + b"." * 40
    assert outcome(data, rows=True) == outcome(data, at_once=False)


@pytest.mark.parametrize("end", [b"e", b"l", b"1", b"t", b"u", b"d", b"0", b"00", b"0" * 10 + b"e"])
@pytest.mark.parametrize("start", [b"](", b"}(", b"](h\x03"])
@pytest.mark.parametrize("window", [80, 1 << 15])
def test_only_the_end_of_a_batch_takes_its_rows(
    start: bytes, end: bytes, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a batch decides where its rows go, however many windows it is in."""
    monkeypatch.setattr(row_reader, "_FIRST_SIZE", window)
    monkeypatch.setattr(row_reader, "_LARGEST_SIZE", window)
    batch = b"u(" if start == b"}(" else b"e("
    rows = b"".join(NUMBERED[:8])
    for batches in (batch, batch + rows + batch):
        data = HEAD + start + rows + batches + rows + end + b"." * 40
        assert outcome(data, rows=True) == outcome(data, at_once=False)


@pytest.mark.parametrize(
    "end", [b"u", b"d", b"l", b"t", b"00u", b"0Nu", b"2N2Nu", b"\x86u", b"\x87"]
)
def test_rows_of_two_classes_are_keys_and_values_to_other_opcodes(end: bytes) -> None:
    pairs = b"".join(map(add, NUMBERED[:8], OTHERS[:8]))
    for start in (b"}(", b"]("):
        head = b"\x8c\x01D\x940h\x04h\x07\x93\x94"
        data = HEAD + head + start + pairs + end + b"." * 40
        assert outcome(data, rows=True) == outcome(data, at_once=False)


@pytest.mark.parametrize("before", [b"](", b"](" + b"".join(NUMBERED) + b"e0]("])
@pytest.mark.parametrize("inside", range(1, len(NUMBERED[0])))
def test_a_frame_inside_a_row(before: bytes, inside: int) -> None:
    """Of rows that are new, and of those that come again."""
    begin, end = before + b"".join(NUMBERED[:-1]), NUMBERED[-1] + b"e." + b"." * 40
    data = HEAD + framed(begin + end[:inside], len(begin) + inside) + framed(end[inside:], 99)
    assert outcome(data, rows=True) == outcome(data, at_once=False)


def test_a_text_that_is_not_unicode_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "LEAST", 3)
    rows = [instance(b"\x8c\x01" + byte + b"\x94") for byte in (b"a", b"b", b"c", b"\xff", b"d")]
    data = HEAD + b"](" + b"".join(rows) + b"e." + b"." * 40
    place = rf"at byte {data.index(0xFF) + 1}: an opcode does not match"
    for as_rows in (True, False):
        with pytest.raises(Damaged, match=place):
            read_pickle(data, what="p", rows=as_rows)


def test_more_values_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_instances, "_MOST_VALUES", 1 << 9)
    rows = [Index({"offset": torch.Size([n, 4]), "fqn": 70_000 + n}) for n in range(1500)]
    data = pickle.dumps([rows, rows[::-1]], 4)
    assert steps(data) > 1400
    assert outcome(data) == outcome(data, at_once=False) == outcome(data, rows=True)


@pytest.mark.parametrize("change", [b"Nb", b"(e", b"Na", b"(NNu", b"NNs", b"(N\x90"])
def test_a_size_is_never_changed_for_equal_ones_are_one_record(change: bytes) -> None:
    with pytest.raises(Damaged, match=r"torch\.Size"):
        read_pickle(HEAD + SIZE + b"K\x01\x85" + SIZED + change + b".", what="p")


@given(st.lists(st.integers(-1, 9) | st.none(), max_size=30))
def test_the_memo_is_a_dict(steps: list[int | None]) -> None:
    memo, plain = Memo(), dict[int, int]()
    for value, step in enumerate(steps):
        index = len(plain) if step is None else step
        if index < 0:
            with pytest.raises(ValueError, match="-1"):
                memo.put(index, value)
            continue
        memo.put(index, value)
        plain[index] = value
        assert len(memo) == len(plain)
    for index in range(-1, 50):
        if index in plain:
            assert memo[index] == plain[index]
        else:
            with pytest.raises(LookupError):
                memo[index]


@example(2)
@given(st.integers(0, 70))
def test_a_class_whose_fields_change_is_learned_anew(period: int) -> None:
    rows = [Index({f"x{n % (period + 1)}": n, "y": 1}) for n in range(200)]
    data = pickle.dumps(rows, 4)
    assert outcome(data) == outcome(data, at_once=False) == outcome(data, rows=True)


def test_rows_that_are_repeated_are_as_one_by_one() -> None:
    """Chunks of tensors that are cut alike, but for one, and a run that another continues."""
    sizes = [[Index({"offset": torch.Size([n]), "more": n}) for n in range(80)] for _ in range(4)]
    vars(sizes[2][40])["more"] += 1
    data = pickle.dumps([SHARED, *sizes, sizes[0][:70], [Index({"offset": None})], *sizes], 4)
    with mock.patch.object(
        RowReader, "_field", autospec=True, side_effect=RowReader._field
    ) as read:
        assert outcome(data, rows=True) == outcome(data, at_once=False)
    assert 0 < read.call_count <= 2 * 4
