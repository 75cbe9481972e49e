"""A zip directory has the records that Python finds in it; one that is damaged ends in Damaged."""

from __future__ import annotations

import io
import random
import zipfile

import pytest
from fuzz_target import one_file

from ckptool.errors import Damaged
from ckptool.serialization.zip import Region, ZipRecord, read_directory


def stored(names: list[str], *, method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name in names:
            file.writestr(name, name.encode() * 3)
    return stream.getvalue()


def outcome(data: bytes) -> list[ZipRecord] | str:
    try:
        return list(read_directory(Region(one_file(data, "x"), "x", 0, len(data))).values())
    except Damaged as error:
        return str(error)


NAMES = ["a/data.pkl", "a/data/0", "a/data/10", "a/é", "a/version"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_directory_has_the_records_that_python_finds(method: int) -> None:
    whole = stored(NAMES, method=method)
    found = outcome(whole)
    assert isinstance(found, list)
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        expected = [
            (i.filename, i.compress_type, i.CRC, i.compress_size, i.file_size, i.header_offset)
            for i in file.infolist()
        ]
    assert expected == [(r.name, r.method, r.crc32, r.stored, r.size, r.header) for r in found]
    assert outcome(stored([])) == []
    assert isinstance(outcome(whole[:-3]), str)
    assert "header 'a/data/PK'" in outcome(whole.replace(b"a/data/10", b"a/data/PK", 1))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_byte_ends_in_damaged_or_in_another_directory(method: int) -> None:
    whole, chance = stored(NAMES, method=method), random.Random(7)
    found = set()
    for at in range(len(whole)):
        flipped = bytes([whole[at] ^ chance.choice([1, 0x80, 0xFF])])
        found.add(type(outcome(whole[:at] + flipped + whole[at + 1 :])))
    assert found == {list, str}
