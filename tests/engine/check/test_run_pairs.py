"""Tensors compared as runs of bytes, however each side is cut and wherever its bytes are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, Record, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check import pairs as pairs_module
from ckptool.engine.check import run_pairs, tensors
from ckptool.engine.check.pairs import TensorPair
from ckptool.engine.checksum import RecordCheck, crc32
from ckptool.engine.progress import Progress
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.tensors import CheckedSource, TensorSource
from ckptool.storage.local import LocalSource

ROWS, COLUMNS = 6, 4
CUTS = {
    "whole": [Box((0, 0), (6, 4))],
    "rows": [Box((0, 0), (1, 4)), Box((1, 0), (1, 4)), Box((1, 0), (6, 4))],
    "rows in another order": [Box((3, 0), (6, 4)), Box((0, 0), (3, 4))],
    "columns": [Box((0, 0), (6, 1)), Box((0, 1), (6, 4))],
}
TENSORS = st.lists(
    st.tuples(*[st.sampled_from([*CUTS])] * 2, st.integers(-1, ROWS * COLUMNS - 1)), max_size=12
)


def write(folder: Path, name: str, cut: str, values: bytes, gap: int) -> TensorEntry:
    """Append the chunks of a tensor to a file, each followed by a gap."""
    chunks = []
    with open(folder / "data", "ab") as stream:
        for box in CUTS[cut]:
            place = Extent("data", stream.tell(), row_major_strides(box.shape, 1))
            chunks.append(Chunk(box, place))
            for row in range(box.lo[0], box.hi[0]):
                stream.write(values[row * COLUMNS :][box.lo[1] : box.hi[1]])
            stream.write(b"\xff" * gap)
    return TensorEntry(name, (name,), BY_NAME["uint8"], (ROWS, COLUMNS), tuple(chunks))


@contextmanager
def compared_in_tiles(nbytes: int) -> Iterator[None]:
    """Compare tensors in tiles of so many bytes; 0 for many small ones at once."""
    with pytest.MonkeyPatch.context() as patch:
        if nbytes:
            patch.setattr(run_pairs, "_SMALL", 0)
            patch.setattr(pairs_module, "PAIR_TILE", nbytes)
        yield


@pytest.mark.parametrize("tile", [0, 5, 24])
@settings(max_examples=60)
@given(wanted=TENSORS, gap=st.sampled_from([0, 3, 5000]), lost=st.integers(0, 30))
def test_what_differs_or_cannot_be_read_is_found_for_each_tensor(
    tile: int,
    wanted: list[tuple[str, str, int]],
    gap: int,
    lost: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sides = [tmp_path_factory.mktemp("side") for _ in range(2)]
    for side in sides:
        (side / "data").touch()
    pairs, changed = [], {}
    for number, (one, other, place) in enumerate(wanted):
        values = bytearray(range(number, number + ROWS * COLUMNS))
        first = write(sides[0], f"t{number}", one, bytes(values), gap)
        if place >= 0:
            values[place] ^= 1
            changed[f"t{number}"] = divmod(place, COLUMNS)
        pairs.append(TensorPair(first, write(sides[1], f"t{number}", other, bytes(values), gap)))
    size = (sides[1] / "data").stat().st_size - lost
    if size > 0:
        with open(sides[1] / "data", "r+b") as stream:
            stream.truncate(size)
    ends = {
        pair.one.name: max(c.at.offset + c.box.volume for c in pair.other.chunks) for pair in pairs
    }
    cut_off = {name for name, end in ends.items() if end > max(size, 0)} if size > 0 else set()
    read = [TensorSource(LocalSource.folder(side)) for side in sides]
    progress = Progress()
    with compared_in_tiles(tile):
        found = tensors.compare(pairs, (read[0], read[1]), None, 1, progress)
    assert found.unreadable.keys() == cut_off
    assert {side for side, _ in found.unreadable.values()} <= {1}
    firsts = {name: d.first for name, d in found.differences.items()}
    assert firsts.items() <= changed.items()
    assert changed.keys() - cut_off <= firsts.keys()  # others may differ before they are cut off
    assert progress.done == 2 * ROWS * COLUMNS * len(pairs)


def test_memory_is_bounded_whatever_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_pairs, "_MOST", 4)
    entries = [write(tmp_path, f"t{n}", "whole", bytes(24), gap=4000) for n in range(8)]
    source = LocalSource.folder(tmp_path)
    pairs = [TensorPair(entry, entry) for entry in entries]
    sizes: list[int] = []
    kept: list[memoryview] = []  # its address is read

    def memory(_: ByteReader, nbytes: int) -> memoryview:
        sizes.append(nbytes)
        kept.append(memoryview(bytearray(nbytes)))
        return kept[-1]

    monkeypatch.setattr(ByteReader, "memory", memory)
    found = tensors.compare(pairs, (TensorSource(source),) * 2, None, 1)
    assert not found.differences
    assert sizes == [4 * 24 + 3 * 4000] * 4


@pytest.mark.parametrize("is_equal", [True, False], ids=["equal", "different"])
def test_checksums_of_records_are_noted_by_whoever_reads_their_runs(
    is_equal: bool, tmp_path: Path
) -> None:
    """Runs that are compared in tiles give the checksum of the whole record, each byte once."""
    values = Random(3).randbytes(ROWS * COLUMNS)
    others = values if is_equal else bytes(byte ^ 1 for byte in values)
    whole, entries = Box.whole((ROWS, COLUMNS)), []
    for name, data in (("one", values), ("other", others)):
        (tmp_path / name).write_bytes(b"head" + data + b"tail")
        record = Record(name, 4, len(data), crc32(data))
        place = Extent(name, 4, row_major_strides(whole.shape, 1), record=record)
        dtype = BY_NAME["uint8"]
        entries.append(TensorEntry("t", ("t",), dtype, whole.shape, (Chunk(whole, place),)))
    damaged = replace(place, record=record._replace(crc32=record.crc32 ^ 1))
    for at, problems in ((place, 0), (damaged, 1)):
        pair = TensorPair(entries[0], replace(entries[1], chunks=(Chunk(whole, at),)))
        files = LocalSource.folder(tmp_path)
        records = RecordCheck(shared=True)
        sides = TensorSource(files), CheckedSource(files, records=records)
        with compared_in_tiles(7):
            found = tensors.compare([pair], sides, None, 1)
        assert bool(found.differences) is not is_equal
        sides[1].touch([pair.other])
        assert len(records.problems()) == problems
