"""A zip directory read at once says what it says record by record."""

from __future__ import annotations

import io
import random
import zipfile

import pytest
from fuzz_target import one_file

from ckptool.errors import Damaged
from ckptool.serialization import zip as archive
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
def test_a_directory_at_once_is_what_it_is_record_by_record(
    monkeypatch: pytest.MonkeyPatch, method: int
) -> None:
    whole = stored(NAMES, method=method)
    chance = random.Random(7)
    damaged = [whole, stored([]), whole[:-3], whole.replace(b"a/data/10", b"a/data/PK")]
    for at in range(len(whole)):
        flipped = bytes([whole[at] ^ chance.choice([1, 0x80, 0xFF])])
        damaged.append(whole[:at] + flipped + whole[at + 1 :])
    at_once = [outcome(data) for data in damaged]
    assert isinstance(at_once[0], list)
    assert len(at_once[0]) == len(NAMES)
    assert any(isinstance(found, str) for found in at_once)
    if method == zipfile.ZIP_STORED:
        assert archive._read_plain(*_directory(whole)) is not None
    monkeypatch.setattr(archive, "_read_plain", lambda *arguments: None)
    assert at_once == [outcome(data) for data in damaged]


def _directory(data: bytes) -> tuple[Region, bytes, int, int]:
    region = Region(one_file(data, "x"), "x", 0, len(data))
    start, size, count = archive.find_directory(region)
    return region, region.read(start, size), start, count
