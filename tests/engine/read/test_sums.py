"""Notes of what was made are small, and say what was noted."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest as xxh3

from ckptool.core.box import Box
from ckptool.engine.read import byte_reader
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.sums import MadeBox, ReadSums
from ckptool.storage.local import LocalReader, LocalSource

COUNT = 10_000


def test_runs_that_are_read_together_have_checksums_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(200))
    (tmp_path / "f").write_bytes(data)
    sums, source, runs = ReadSums(), LocalSource(tmp_path, {}), [(0, 60), (64, 36), (180, 20)]
    reads: list[int] = []
    real = LocalReader.read_into

    def read_into(self: LocalReader, file: str, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        real(self, file, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_into", read_into)
    monkeypatch.setattr(byte_reader, "_GAP", 4)
    with closing(ByteReader(source, sums=sums)) as reader:
        found = [*map(bytes, reader.read_close(("f", *run) for run in [*runs[1:], runs[0]]))]
    assert found == [data[64:100], data[180:], data[:60]]
    assert reads == [100, 20]
    noted = [(run.offset, run.nbytes, run.checksum) for run in sums.runs("f", 0, 200)]
    assert noted == [(at, n, xxh3(data[at : at + n])) for at, n in runs]


def test_a_note_of_a_box_is_small() -> None:
    sums = ReadSums()
    tracemalloc.start()
    try:
        for row in range(COUNT):
            sums.note_made("w", Box((row * 512, 0), (row * 512 + 512, 1024)), b"%d" % row)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / COUNT < 50
    assert len(sums.made("w", 2)) == COUNT


@given(
    st.integers(0, 4).flatmap(
        lambda dims: st.lists(
            st.tuples(
                st.lists(st.integers(0, 1 << 60), min_size=2 * dims, max_size=2 * dims),
                st.binary(max_size=9),
                st.sampled_from([(), (("infinite", 3),)]),
            ),
            min_size=1,
        )
    )
)
def test_what_was_noted_is_returned_once(
    noted: list[tuple[list[int], bytes, tuple[tuple[str, int], ...]]],
) -> None:
    sums, wanted = ReadSums(), set[MadeBox]()
    dims = len(noted[0][0]) // 2
    for edges, data, lost in noted:
        box = Box(tuple(edges[:dims]), tuple(edges[dims:]))
        sums.note_made("w", box, data, lost)
        wanted.add(MadeBox(box, xxh3(data), lost))
    found = sums.made("w", dims)
    assert len(found) == len(wanted)
    assert {*found} == wanted
    assert not sums.made("other", dims)
