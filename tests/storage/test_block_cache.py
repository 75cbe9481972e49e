"""Blocks of a store's files: only announced bytes are fetched, and an error reaches everybody."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptool.storage.block_cache import BLOCK, BlockCache
from ckptool.storage.clients.client import ObjectVersion

FILE = ObjectVersion("a", "")
DATA = random.Random(1).randbytes(5 * BLOCK)


def read(cache: BlockCache, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    assert cache.read_into(FILE, start, memoryview(buffer)) == nbytes
    return bytes(buffer)


def test_of_what_is_announced_just_that_is_fetched() -> None:
    asked: list[tuple[int, int]] = []

    def fetch(file: ObjectVersion, start: int, end: int) -> bytes:
        asked.append((start, end))
        return DATA[start:end]

    cache = BlockCache(fetch)
    edge = (BLOCK + 1000, 2000)
    cache.expect([(FILE, *edge), (FILE, BLOCK + 4000, 10)])
    assert read(cache, *edge) == DATA[edge[0] :][:2000]
    assert read(cache, BLOCK + 4000, 10) == DATA[BLOCK + 4000 :][:10]
    assert asked == [(BLOCK + 1000, BLOCK + 4010)]
    assert read(cache, BLOCK, 10) == DATA[BLOCK:][:10], "not announced: the block is fetched"
    assert asked[1:] == [(BLOCK, 2 * BLOCK)]


def test_an_error_of_one_of_several_requests_leaves_nobody_waiting() -> None:
    fails = threading.Event()

    def fetch(file: ObjectVersion, start: int, end: int) -> bytes:
        if fails.is_set():
            raise PermissionError("no")
        return DATA[start:end]

    cache = BlockCache(fetch)
    read(cache, BLOCK, 1)  # so that the blocks around it are two requests
    fails.set()
    with pytest.raises(PermissionError):
        read(cache, 0, 3 * BLOCK)
    fails.clear()
    assert read(cache, 0, 5 * BLOCK) == DATA


def test_where_no_thread_can_be_started_the_reader_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    cache = BlockCache(lambda file, start, end: DATA[start:end])
    cache.expect([(FILE, 10, 20)])
    assert read(cache, 10, 20) == DATA[10:30]


def test_reads_across_announced_and_other_blocks_are_right() -> None:
    cache = BlockCache(lambda file, start, end: DATA[start:end])
    for seed in range(50):
        chosen = random.Random(seed)
        start = chosen.randrange(4 * BLOCK)
        cache.expect([(FILE, chosen.randrange(4 * BLOCK), chosen.randrange(1, BLOCK))])
        nbytes = chosen.randrange(1, BLOCK)
        assert read(cache, start, nbytes) == DATA[start : start + nbytes]
