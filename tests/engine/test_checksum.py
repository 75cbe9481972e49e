"""CRC-32 in pieces, against zlib over the whole."""

from __future__ import annotations

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.catalog import Record
from ckptool.engine.checksum import RecordCheck, crc32, joined


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
    assert joined(pieces) == zlib.crc32(data)


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
