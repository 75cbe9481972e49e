"""A zip directory has the records that Python finds in it; one that is damaged ends in Damaged."""

from __future__ import annotations

import io
import random
import zipfile

import pytest
from fuzz_target import one_file

from ckptool.errors import Damaged
from ckptool.serialization.source import EDGE, NearReads
from ckptool.serialization.zip import Region, ZipRecord, read_directory
from ckptool.storage.virtual.memory import MemoryFiles


def stored(names: list[str], *, method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name in names:
            file.writestr(name, name.encode() * 3)
    return stream.getvalue()


def outcome(data: bytes) -> list[ZipRecord] | str:
    try:
        region = Region(NearReads(one_file(data, "x")), "x", 0, len(data))
        return list(read_directory(region).values())
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


class Counted(MemoryFiles):
    """Buffers that note how many bytes are read at once."""

    def __init__(self, buffers: dict[str, memoryview]) -> None:
        super().__init__(buffers)
        self.sizes = list[int]()

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        self.sizes.append(nbytes)
        return super().read(file, offset, nbytes)


def test_small_reads_that_follow_one_another_open_a_file_a_few_times() -> None:
    """As those of many small archives; far from the last one no byte more than 512 is read."""
    data = random.Random(0).randbytes(1 << 20)
    source = Counted({"x": memoryview(data)})
    reads = NearReads(source)
    for offset in range(0, len(data), 100):
        nbytes = min(100, len(data) - offset)
        assert reads.read("x", offset, nbytes) == data[offset : offset + nbytes]
    assert len(source.sizes) < 16
    source.sizes.clear()
    assert reads.read("x", 0, 2048) == data[:2048]
    assert reads.read("x", 1 << 19, 100) == data[1 << 19 :][:100]
    assert source.sizes == [2048, 512]
    with pytest.raises(Damaged, match="truncated"):
        reads.read("x", len(data) - 100, 200)


def test_of_large_archives_only_the_announced_edges_are_read() -> None:
    """The next one's beginning follows one's end; a store has fetched no more than the edges."""
    nbytes = 100_000
    source = Counted({"x": memoryview(bytes(3 * nbytes))})
    reads = NearReads(source)
    for offset in range(0, 3 * nbytes, nbytes):
        Region(reads, "x", offset, nbytes)
    assert source.sizes == [EDGE] * 6
