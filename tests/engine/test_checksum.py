"""CRC-32 in pieces against zlib over the whole, and records against what their writer stored."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.catalog import Record
from ckptool.engine.checksum import RecordCheck, crc32, join_crcs
from ckptool.errors import Damaged
from ckptool.storage.local import LocalSource


@st.composite
def split(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Bytes, and their pieces ``(offset, nbytes, crc)`` in any order."""
    data = draw(st.binary(max_size=200))
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=6)) | {0, len(data)})
    pieces = [(a, b - a, crc32(data[a:b])) for a, b in pairwise(cuts)]
    return data, draw(st.permutations(pieces))


@given(split())
def test_joined_pieces_are_the_whole(found: tuple[bytes, list[tuple[int, int, int]]]) -> None:
    data, pieces = found
    assert join_crcs(pieces) == zlib.crc32(data)


@given(split(), st.integers(0, 2**32 - 1))
def test_records_are_compared_with_what_the_writer_recorded(
    found: tuple[bytes, list[tuple[int, int, int]]], stored: int
) -> None:
    data, pieces = found
    check = RecordCheck()
    record = Record("f", 100, len(data), stored)
    check.touch(record, "w")
    for offset, nbytes, crc in pieces:
        check.piece(record, 100 + offset, nbytes, crc)
    assert check.unseen() == []
    assert bool(check.problems()) == (stored != zlib.crc32(data))


def test_whole_records_are_compared_as_they_are_read() -> None:
    """One that is as written needs no other read; one that is not is reported."""
    parts = [memoryview(b"one"), memoryview(b"two")]
    records = [Record("f", 0, 3, crc32(parts[0])), Record("f", 5, 3, crc32(b"TWO"))]
    check = RecordCheck(shared=True)
    check.touch(records[0], "other", required=True)
    for record, data in zip(records, parts, strict=True):
        check.touch(record, "w")
        check.note(record, record.offset, data)
    assert check.unseen() == []
    (problem,) = check.problems()
    assert "bytes 5 to 8 (w) have CRC-32" in problem


@given(split(), st.data())
def test_a_piece_that_is_lacking_leaves_the_record_unseen(
    found: tuple[bytes, list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    whole, pieces = found
    if not pieces:
        return
    left_out = data.draw(st.sampled_from(pieces))
    check = RecordCheck()
    record = Record("f", 0, len(whole), zlib.crc32(whole))
    check.touch(record, "w")
    for piece in pieces:
        if piece != left_out:
            check.piece(record, *piece)
    assert check.unseen() == [record]
    check.piece(record, *left_out)
    assert check.unseen() == []
    assert check.problems() == []


@given(split())
def test_a_record_that_was_read_as_written_at_once_is_intact(
    found: tuple[bytes, list[tuple[int, int, int]]],
) -> None:
    data, pieces = found
    check = RecordCheck(shared=True)
    record, other = Record("f", 7, len(data), crc32(data)), Record("f", 7, len(data), 1)
    for each in (record, other):
        check.touch(each, "w", joined=True)
        check.piece(each, 7, len(data), crc32(data))
    for offset, nbytes, _ in pieces:
        check.note(record, 7 + offset, memoryview(data)[offset : offset + nbytes])
    assert check.unseen() == []
    assert list(check.cut()) == []
    assert len(check.problems()) == (crc32(data) != 1)


def test_a_problem_names_the_file_the_tensor_and_both_checksums() -> None:
    check = RecordCheck()
    record = Record("shard.pt", 1000, 4, 0x12345678)
    check.touch(record, "model.w")
    check.piece(record, 1000, 4, 0x9ABCDEF0)
    (line,) = check.problems()
    assert all(word in line for word in ("shard.pt", "model.w", "12345678", "9abcdef0", "1,000"))


def test_records_that_no_piece_covers_are_read(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    (tmp_path / "f").write_bytes(b"head" + data)
    source = LocalSource.folder(tmp_path)
    for stored, problems in ((zlib.crc32(data), 0), (1, 1)):
        check = RecordCheck()
        check.touch(Record("f", 4, len(data), stored), "w")
        check.read_unseen(source, 2)
        assert check.unseen() == []
        assert len(check.problems()) == problems


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("step", [50, 90, 110])
def test_what_no_piece_covers_is_read_to_the_last_byte(
    count: int, step: int, tmp_path: Path
) -> None:
    """Of pieces of 100 bytes with gaps, also many, or that overlap."""
    data = bytes(n % 251 for n in range(count * 120))
    (tmp_path / "f").write_bytes(data)
    for stored, problems in ((zlib.crc32(data), 0), (1, 1)):
        check, record = RecordCheck(), Record("f", 0, len(data), stored)
        check.touch(record, "w")
        for start in range(0, count * step, step):
            check.note(record, start, memoryview(data)[start : start + 100])
        check.read_unseen(LocalSource.folder(tmp_path), 2)
        assert check.unseen() == []
        assert len(check.problems()) == problems


def test_of_shared_work_only_what_is_required_must_be_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcd" * 2)
    check = RecordCheck(shared=True)
    mine, seen, others = (Record("f", at, 4, zlib.crc32(b"abcd") ^ (at == 1)) for at in (0, 4, 1))
    check.touch(mine, "mine", required=True)
    check.touch(seen, "seen")
    check.touch(others, "others")
    check.note(seen, 4, memoryview(b"abcx"))
    assert check.unseen() == [mine]
    check.read_unseen(LocalSource.folder(tmp_path), 1)
    assert [problem.tensor for problem in check.problems()] == ["seen"]


def test_a_file_that_ends_before_its_record_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"short")
    check = RecordCheck()
    check.touch(Record("f", 0, 100, 0), "w")
    with pytest.raises(Damaged, match="f"):
        check.read_unseen(LocalSource.folder(tmp_path), 1)


def test_problems_come_in_the_order_of_the_files() -> None:
    """Whichever thread touched a record first."""
    check = RecordCheck()
    for file, offset in (("b", 0), ("a", 64), ("a", 8)):
        record = Record(file, offset, 4, 1)
        check.touch(record, f"{file}{offset}")
        check.note(record, offset, memoryview(b"1234"))
    assert [problem.tensor for problem in check.problems()] == ["a8", "a64", "b0"]
