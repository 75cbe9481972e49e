"""Spans of files as they are read."""

from __future__ import annotations

from ckptool.engine.check.content import check_spans
from ckptool.engine.check.spans import ByteSpan, span_jobs
from ckptool.engine.progress import UNWATCHED
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.containers import runs_of
from ckptool.storage.virtual.memory import MemoryFiles


def test_one_file_is_read_after_the_other_whatever_the_tensors_order() -> None:
    places = [("a", 90), ("b", 70), ("a", 10), ("b", 0)]
    spans = [ByteSpan(file, at, 15, None, "") for file, at in places]
    jobs = span_jobs(spans, {}, 10)
    runs = [run for job in jobs for of_job in job.runs for run in runs_of(of_job(1), set())]
    expected = [("a", 10), ("a", 20), ("a", 90), ("a", 100), ("b", 0), ("b", 10), ("b", 70)]
    assert [run[:2] for run in runs] == [*expected, ("b", 80)]


class Counted(MemoryFiles):
    """Buffers that count how often they are read."""

    reads = 0

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        self.reads += 1
        super().read_into(file, offset, buffer)


def test_small_spans_are_read_together_and_each_is_a_tile_of_its_own() -> None:
    data = bytes(range(250)) * 8
    files = Counted({"a": memoryview(data), "b": memoryview(data)})
    places = [(file, at) for file in "ab" for at in range(0, 2000, 20)]
    spans = [ByteSpan(file, at, 15, None, "") for file, at in places]
    spans.append(ByteSpan("b", 2000, 0, None, ""))
    tiles = list[tuple[str, int, bytes]]()
    for job in span_jobs(spans, {}, 1000):
        for tile in job.read(ByteReader(files)):
            assert tile.span is not None
            tiles.append((tile.span.file, tile.span.offset + tile.start, bytes(tile.data)))
    assert tiles == [(file, at, data[at : at + 15]) for file, at in places]
    assert files.reads == 4


def test_a_file_that_cannot_be_read_hides_no_damage_in_another() -> None:
    files = MemoryFiles({"a": memoryview(bytes(20)), "b": memoryview(bytes(10))})
    spans = [ByteSpan(file, 0, 20, 1, f"a record of {file}") for file in "ab"]
    problems = check_spans(spans, files, 1, UNWATCHED).problems
    assert {problem.code for problem in problems} == {"file-truncated", "crc-mismatch"}
