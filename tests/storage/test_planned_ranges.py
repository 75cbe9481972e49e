"""Announced reads of a store: each byte is fetched once, in few requests, in order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trials import trials

from ckptool.storage import planned_ranges
from ckptool.storage.clients.client import ObjectVersion
from ckptool.storage.planned_ranges import PlannedRanges, VersionSpan, join_runs, memory_to_read

FILES = [ObjectVersion(name, "") for name in "abc"]
SIZE = 40_000
DATA = {file: random.Random(file.key).randbytes(SIZE) for file in FILES}

runs = st.lists(
    st.tuples(st.sampled_from(FILES), st.integers(0, SIZE - 1), st.integers(0, 3000)).map(
        lambda run: (run[0], run[1], min(run[2], SIZE - run[1]))
    ),
    max_size=40,
)


class Store:
    """Files that note what is fetched of them, and how much of it is held at the same time."""

    def __init__(self) -> None:
        self.fetched: list[tuple[ObjectVersion, int, int]] = []
        self.lock = threading.Lock()

    def fetch(self, file: ObjectVersion, start: int, end: int) -> bytes:
        with self.lock:
            self.fetched.append((file, start, end))
        return DATA[file][start:end]


def read_all(ranges: PlannedRanges, wanted: list[VersionSpan], threads: int) -> None:
    def read(run: VersionSpan) -> None:
        file, start, nbytes = run
        buffer = bytearray(nbytes)
        done = ranges.read_into(file, start, memoryview(buffer))
        assert done is None or (done == nbytes and bytes(buffer) == DATA[file][start:][:nbytes])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, wanted))


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_ranges, "_LARGEST", 4096)
    monkeypatch.setattr(planned_ranges, "_LEAST", 512)
    monkeypatch.setattr(planned_ranges, "_GAP", 100)
    monkeypatch.setattr(planned_ranges, "_CHEAP", 100)


@given(runs)
@settings(max_examples=trials(80))
def test_ranges_hold_all_runs_apart_and_waste_little(wanted: list[VersionSpan]) -> None:
    ranges = list(join_runs(wanted, 4096))
    bytes_of = {file: bytearray(SIZE) for file in FILES}
    for file, start, nbytes in wanted:
        bytes_of[file][start : start + nbytes] = b"\1" * nbytes
    for file, start, end in ranges:
        assert 0 < end - start <= 4096
        assert not any(value > 1 for value in bytes_of[file][start:end])
        for at in range(start, end):
            bytes_of[file][at] += 2
    assert all(value != 1 for values in bytes_of.values() for value in values)
    count = sum(value == 3 for values in bytes_of.values() for value in values)
    unwanted = sum(value == 2 for values in bytes_of.values() for value in values)
    assert unwanted <= len(ranges) * 100 + count / 32


@given(runs, st.integers(1, 4))
def test_each_byte_is_fetched_once_where_there_is_room(
    wanted: list[VersionSpan], threads: int
) -> None:
    store = Store()
    ranges = PlannedRanges(store.fetch)
    ranges.plan(wanted)
    read_all(ranges, wanted, threads)
    assert len(store.fetched) == len(set(store.fetched))
    assert sum(end - start for _, start, end in store.fetched) <= sum(
        part.nbytes for part in join_runs(wanted)
    )
    assert ranges._nbytes == 0 == len(ranges._futures)


@given(runs, st.integers(1, 20_000), st.randoms())
def test_whatever_the_room_and_the_order_the_bytes_are_right(
    wanted: list[VersionSpan], capacity: int, order: random.Random
) -> None:
    ranges = PlannedRanges(Store().fetch, capacity)
    ranges.plan(wanted)
    mixed = [*wanted]
    order.shuffle(mixed)
    read_all(ranges, mixed, 3)


def test_runs_that_are_read_side_by_side_are_fetched_once_in_little_room() -> None:
    store, runs = Store(), 10
    every = SIZE // runs
    wanted = [(FILES[0], at * every + low, 50) for low in range(0, every, 50) for at in range(runs)]
    ranges = PlannedRanges(store.fetch, 2 * runs * planned_ranges._LEAST)
    ranges.plan(wanted)
    read_all(ranges, wanted, 1)
    assert sum(end - start for _, start, end in store.fetched) == SIZE


def test_ranges_are_as_large_as_there_is_room_for() -> None:
    """Not the smallest at once: each is a request."""
    store, runs, largest = Store(), 10, planned_ranges._LARGEST
    every = SIZE // runs
    wanted = [(FILES[0], at * every + low, 50) for low in range(0, every, 50) for at in range(runs)]
    ranges = PlannedRanges(store.fetch, 12 * largest)
    ranges.plan(wanted)
    read_all(ranges, wanted, 1)
    assert len(store.fetched) == -(-SIZE // (largest // 2))


def test_what_was_not_announced_is_not_read_here() -> None:
    ranges = PlannedRanges(Store().fetch)
    ranges.plan([(FILES[0], 0, 1000)])
    assert ranges.read_into(FILES[0], 2000, memoryview(bytearray(10))) is None
    assert ranges.read_into(FILES[1], 0, memoryview(bytearray(10))) is None


def test_a_range_that_was_read_is_forgotten() -> None:
    store = Store()
    ranges = PlannedRanges(store.fetch)
    ranges.plan([(FILES[0], 0, 1000), (FILES[0], 0, 1000)])
    buffer = memoryview(bytearray(1000))
    assert ranges.read_into(FILES[0], 0, buffer) == 1000
    assert ranges.read_into(FILES[0], 0, buffer) == 1000
    assert ranges.read_into(FILES[0], 0, buffer) is None
    assert len(store.fetched) == 1


def test_an_error_is_raised_where_its_bytes_are_read_and_ends_the_reading_ahead() -> None:
    asked = []

    def refuse(file: ObjectVersion, start: int, end: int) -> bytes:
        asked.append(start)
        raise PermissionError("no")

    ranges = PlannedRanges(refuse, 10_000)
    ranges.plan([(FILES[0], start, 4000) for start in range(0, 40_000, 4000)])
    with pytest.raises(PermissionError):
        ranges.read_into(FILES[0], 36_000, memoryview(bytearray(10)))
    if ranges._pool is not None:
        ranges._pool.shutdown()
    assert len(asked) < 40, "of 78 ranges"


def test_a_file_that_ended_early_gives_what_there_is() -> None:
    ranges = PlannedRanges(Store().fetch)
    ranges.plan([(FILES[0], SIZE - 10, 100)])
    assert ranges.read_into(FILES[0], SIZE - 10, memoryview(bytearray(100))) == 10


@pytest.mark.parametrize(
    ("order", "memory"),
    [
        (lambda file, at: (file, at), 3 * 4000),
        (lambda file, at: (at, file), 3 * 4000),
    ],
)
def test_memory_to_read(order: Callable[[str, int], tuple[object, ...]], memory: int) -> None:
    places = [(file, at) for file in FILES for at in range(0, 12_000, 1000)]
    in_order = sorted(places, key=lambda place: order(place[0].key, place[1]))
    needed = memory_to_read((file, at, 1000) for file, at in in_order)
    assert needed == (4000 if in_order[1][0] == in_order[0][0] else memory)


def test_no_runs_need_no_memory() -> None:
    assert memory_to_read([]) == 0


def test_a_long_run_is_held_a_range_at_a_time() -> None:
    needed = memory_to_read([(FILES[0], 0, 40_000)])
    assert needed == 4000


def test_what_was_announced_and_is_given_up_is_forgotten() -> None:
    store = Store()
    ranges = PlannedRanges(store.fetch)
    end = ranges.plan([(FILES[0], 0, SIZE)])
    assert ranges.read_into(FILES[0], 0, memoryview(bytearray(10))) == 10
    end()
    if ranges._pool is not None:
        ranges._pool.shutdown()
    assert ranges._nbytes == 0 == len(ranges._futures)
    assert ranges.read_into(FILES[0], 0, memoryview(bytearray(10))) is None


def test_where_no_thread_can_be_started_the_reader_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    ranges = PlannedRanges(Store().fetch)
    ranges.plan([(FILES[0], 0, SIZE)])
    buffer = bytearray(SIZE)
    assert ranges.read_into(FILES[0], 0, memoryview(buffer)) == SIZE
    assert bytes(buffer) == DATA[FILES[0]]
    assert ranges._on_their_way == 0


@pytest.mark.parametrize("passes", [2, 3])
def test_what_does_not_fit_is_fetched_once_a_pass(passes: int) -> None:
    store = Store()
    ranges = PlannedRanges(store.fetch, 12_000)
    wanted = [(FILES[0], at, 1000) for at in range(0, SIZE, 1000)] * passes
    ranges.plan(wanted)
    read_all(ranges, wanted, 1)
    fetched = sum(end - start for _, start, end in store.fetched)
    assert SIZE * passes - 12_000 * (passes - 1) <= fetched <= SIZE * passes
    assert ranges._nbytes == 0 == len(ranges._futures)


def test_what_is_half_read_is_kept_where_all_that_is_half_read_fits() -> None:
    store = Store()
    ranges = PlannedRanges(store.fetch, 8 * 4096)
    halves = [(FILES[0], 0, 2000), (FILES[0], 2000, 2000)]
    wanted = [halves[0], *((FILES[1], at, 4000) for at in range(0, SIZE, 4000)), halves[1]]
    ranges.plan(wanted)
    read_all(ranges, wanted, 1)
    assert len(store.fetched) == len(set(store.fetched))
