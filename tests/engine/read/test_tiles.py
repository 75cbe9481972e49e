"""The one loop that reads: jobs on threads, their tiles in order, into a sink."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.engine.read.tiles import ByteReader, ByteSource, Job, byte_job, read_tiles
from ckptool.errors import Damaged
from ckptool.storage.local import TILE, LocalSource

SIZE = 3 * TILE + 17


@pytest.fixture
def source(tmp_path: Path) -> ByteSource:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * SIZE)
    return ByteSource(LocalSource.folder(tmp_path))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_tiles_of_a_job_come_in_order_and_are_counted(source: ByteSource, workers: int) -> None:
    read: dict[str, list[bytes]] = {}
    counted: list[int] = []

    def keep(name: str, tiles: Iterator[memoryview]) -> None:
        read[name] = [bytes(tile) for tile in tiles]

    jobs = [byte_job(name, name, 5, SIZE - 5) for name in "abc"]
    read_tiles(source, jobs, keep, workers, counted.append)
    assert {name: b"".join(tiles) for name, tiles in read.items()} == {
        name: name.encode() * (SIZE - 5) for name in "abc"
    }
    assert [len(tile) for tile in read["a"]] == [TILE, TILE, TILE, 12]
    assert sum(counted) == 3 * (SIZE - 5)


def test_a_sink_may_stop_early(source: ByteSource) -> None:
    seen: list[int] = []
    jobs = [byte_job(name, name, 0, SIZE) for name in "ab"]
    read_tiles(source, jobs, lambda name, tiles: seen.append(len(next(tiles))), 1)
    assert seen == [TILE, TILE]


def test_a_sink_may_catch_what_a_read_raises(source: ByteSource) -> None:
    lost: list[str] = []

    def catch(name: str, tiles: Iterator[memoryview]) -> None:
        try:
            list(tiles)
        except Damaged:
            lost.append(name)

    read_tiles(source, [byte_job("a", "a", 0, SIZE + 1), byte_job("b", "b", 0, SIZE)], catch, 1)
    assert lost == ["a"]


def test_the_first_error_ends_the_jobs_of_all_threads(source: ByteSource) -> None:
    begun, failed = threading.Event(), threading.Event()

    def read_forever(reader: ByteReader) -> Iterator[memoryview]:
        while True:
            yield reader.read("a", 0, 1)

    def sink(name: str, tiles: Iterator[memoryview]) -> None:
        if name == "forever":
            for _ in tiles:
                begun.set()
            failed.set()
        begun.wait()
        raise ValueError(name)

    jobs = [Job("forever", read_forever), byte_job("bad", "a", 0, 1)]
    with pytest.raises(ValueError, match="bad"):
        read_tiles(source, jobs, sink, 2)
    assert not failed.is_set()
