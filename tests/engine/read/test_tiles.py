"""The one loop that reads: jobs on threads, their tiles in order, into a sink."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.progress import Progress
from ckptool.engine.read.byte_reader import ByteReader, ByteSource, byte_job
from ckptool.engine.read.tensors import tensor_job
from ckptool.engine.read.tiles import LARGE, Job, read_tiles
from ckptool.errors import Damaged
from ckptool.storage.files import TILE
from ckptool.storage.local import LocalSource

SIZE = 3 * TILE + 17


@pytest.fixture
def source(tmp_path: Path) -> ByteSource:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * SIZE)
    return ByteSource(LocalSource.folder(tmp_path))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_tiles_of_a_job_come_in_order_and_are_counted(source: ByteSource, workers: int) -> None:
    read: dict[str, list[bytes]] = {}
    progress = Progress()

    def keep(name: str, tiles: Iterator[memoryview]) -> None:
        read[name] = [bytes(tile) for tile in tiles]

    jobs = [byte_job(name, name, 5, SIZE - 5) for name in "abc"]
    read_tiles(source, jobs, keep, workers, progress)
    assert {name: b"".join(tiles) for name, tiles in read.items()} == {
        name: name.encode() * (SIZE - 5) for name in "abc"
    }
    assert [len(tile) for tile in read["a"]] == [TILE, TILE, TILE, 12]
    assert progress.done == 3 * (SIZE - 5)


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


class NoReader:
    def close(self) -> None:
        """Nothing is held."""


class NoFiles:
    """Something to read nothing from, for sinks that only count their jobs."""

    sides = ()

    def reader(self) -> NoReader:
        return NoReader()


def empty_jobs(count: int) -> Iterator[Job[int, NoReader, memoryview]]:
    return (Job(number, lambda reader: iter(())) for number in range(count))


def test_every_job_is_done_once() -> None:
    done: list[int] = []
    read_tiles(NoFiles(), empty_jobs(100), lambda number, tiles: done.append(number), 4)
    assert sorted(done) == list(range(100))


def test_a_reader_that_cannot_be_made_is_an_error() -> None:
    class Full(NoFiles):
        def reader(self) -> NoReader:
            raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        read_tiles(Full(), empty_jobs(3), lambda number, tiles: None, 2)


def test_the_first_error_stops_all() -> None:
    done: list[int] = []

    def sink(number: int, tiles: Iterator[memoryview]) -> None:
        if number == 5:
            raise ValueError(number)
        done.append(number)

    with pytest.raises(ValueError, match="5"):
        read_tiles(NoFiles(), empty_jobs(10_000), sink, 1)
    assert done == [0, 1, 2, 3, 4]


def test_an_interruption_is_raised_once_all_threads_have_ended() -> None:
    ended = []

    def sink(number: int, tiles: Iterator[memoryview]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        read_tiles(NoFiles(), empty_jobs(1), sink, 1)
    assert ended == [0]


def test_small_jobs_are_done_by_one_thread_after_the_other(
    source: ByteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.engine.read.tiles.perf_counter", lambda: 0.0)
    at_work: list[str] = []
    most: list[int] = []

    def sink(name: str, tiles: Iterator[memoryview]) -> None:
        at_work.append(name)
        most.append(len(at_work))
        assert sum(len(tile) for tile in tiles) == TILE // 4
        time.sleep(0)  # lets another thread in, if there is one
        at_work.remove(name)

    read_tiles(source, [byte_job("a", "a", 0, TILE // 4)] * 40, sink, 3)
    assert len(most) == 40
    assert max(most) == 1


@pytest.mark.parametrize(("rows", "is_small"), [(64, True), (1 << 16, False)])
def test_a_tensor_is_a_small_job_if_computing_with_it_takes_little(
    rows: int, is_small: bool
) -> None:
    entry = TensorEntry("t", ("t",), BY_NAME["float32"], (rows, 4), ())
    assert (tensor_job(entry).nbytes < LARGE) == is_small


def test_large_jobs_are_done_at_once(source: ByteSource) -> None:
    both = threading.Barrier(2, timeout=20)
    jobs = [byte_job(name, name, 0, TILE) for name in "ab"]

    def meet(name: str, tiles: object) -> None:
        both.wait()

    read_tiles(source, jobs, meet, 2)


def test_small_jobs_that_mostly_wait_are_done_at_once(
    source: ByteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.engine.read.tiles.thread_time", lambda: 0.0)
    both = threading.Barrier(2, timeout=20)

    def sink(name: str, tiles: Iterator[memoryview]) -> None:
        if name == "b":
            both.wait()

    four_at_a_time = [byte_job(name, name, 0, TILE // 4) for name in "aaaabaaabaaa"]
    read_tiles(source, four_at_a_time, sink, 2)


def test_an_error_of_a_small_job_ends_those_that_wait_for_their_turn(source: ByteSource) -> None:
    done: list[str] = []

    def sink(name: str, tiles: Iterator[memoryview]) -> None:
        if name == "b":
            raise ValueError(name)
        done.append(name)

    jobs = (byte_job(name, name, 0, TILE // 4) for name in "b" + "a" * 10_000)
    with pytest.raises(ValueError, match="b"):
        read_tiles(source, jobs, sink, 3)
    assert len(done) < 10_000
