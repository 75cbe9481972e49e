"""Records whose pieces are read in any order, against the CRC-32 that their writer stored."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.catalog import Record
from ckptool.engine.read.records import RecordCheck
from ckptool.errors import Damaged
from ckptool.storage.local import LocalSource
from tests.engine.test_checksum import split


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
    check.whole(record, zlib.crc32(whole))
    assert check.unseen() == []
    assert check.problems() == []


def test_a_problem_names_the_file_the_tensor_and_both_checksums() -> None:
    check = RecordCheck()
    record = Record("shard.pt", 1000, 4, 0x12345678)
    check.touch(record, "model.w")
    check.whole(record, 0x9ABCDEF0)
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


def test_a_file_that_ends_before_its_record_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"short")
    check = RecordCheck()
    check.touch(Record("f", 0, 100, 0), "w")
    with pytest.raises(Damaged, match="f"):
        check.read_unseen(LocalSource.folder(tmp_path), 1)
