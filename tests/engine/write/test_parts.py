"""What parts note of records: joined, it is as if one process had read all."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trials import trials

from ckptool.core.box import Box, is_run
from ckptool.core.catalog import Record
from ckptool.engine.checksum import RecordCheck, crc32
from ckptool.engine.write.parts import note_cut, require_joined
from ckptool.engine.write.schemas import NotedRecord
from ckptool.errors import Damaged, Unsupported
from ckptool.storage.local import LocalSource

DATA = bytes(range(200))
RECORD = Record("file", 20, 150, crc32(DATA[20:170]))


def part(runs: list[tuple[int, int]], data: bytes = DATA) -> list[NotedRecord]:
    """Return the note of a part that has read some runs of the record, and what it saw there."""
    joined = RecordCheck(shared=True)
    joined.touch(RECORD, "w", joined=True)
    for start, end in runs:
        joined.note(RECORD, start, memoryview(data)[start:end])
    return note_cut(joined)


def join(folder: Path, *parts: list[NotedRecord]) -> None:
    """Check what parts noted against the file."""
    (folder / "file").write_bytes(DATA)
    require_joined(chain.from_iterable(parts), LocalSource.folder(folder), 1)


RUNS = st.lists(st.tuples(st.integers(20, 170), st.integers(20, 170)).map(sorted), max_size=4)


@settings(max_examples=60, deadline=None)
@given(runs=st.lists(RUNS, min_size=1, max_size=4))
def test_whatever_parts_have_read(
    runs: list[list[tuple[int, int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With gaps, overlaps and repetitions: the record is found intact."""
    join(tmp_path_factory.mktemp("m"), *map(part, runs))


def test_a_part_that_read_something_else(tmp_path: Path) -> None:
    changed = bytearray(DATA)
    changed[100] ^= 1
    one, odd = part([(20, 90)]), part([(90, 170)], bytes(changed))
    join(tmp_path, one, part([(90, 170)]))
    with pytest.raises(Damaged, match="CRC-32"):
        join(tmp_path, one, odd)
    with pytest.raises(Damaged, match="different bytes 90 to 170 "):
        join(tmp_path, one, part([(90, 170)]), odd)


def test_a_part_that_read_all_of_it_has_checked_it() -> None:
    assert not part([(20, 60), (60, 170)])
    noted = part([(20, 60), (60, 169)])
    assert noted[0].pieces == [(20, 149, crc32(DATA[20:169]))]


@pytest.mark.parametrize(
    "record",
    [
        NotedRecord("other", 20, 150, 0, "w", []),
        NotedRecord("../file", 20, 150, 0, "w", []),
        NotedRecord("file", 20, 181, 0, "w", []),
        NotedRecord("file", 20, 150, 0, "w", [(19, 10, 0)]),
        NotedRecord("file", 20, 150, 0, "w", [(160, 11, 0)]),
    ],
)
def test_a_record_that_the_source_cannot_have(record: NotedRecord, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    with pytest.raises(Unsupported, match="note of a part is damaged"):
        require_joined([record], LocalSource.folder(tmp_path), 1)


@settings(max_examples=trials(80))
@given(data=st.data())
def test_runs_of_a_box(data: st.DataObject) -> None:
    """A part is a run if its elements are adjoining when all are numbered."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    lo = [data.draw(st.integers(0, n - 1)) for n in shape]
    hi = [data.draw(st.integers(low + 1, n)) for low, n in zip(lo, shape, strict=True)]
    numbers = [0]
    for low, high, n in zip(lo, hi, shape, strict=True):
        numbers = [at * n + index for at in numbers for index in range(low, high)]
    adjoining = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert is_run(Box(tuple(lo), tuple(hi)), Box.whole(shape)) == adjoining
