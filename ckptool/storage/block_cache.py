"""Blocks of a store's files: neighbouring reads share a request; what comes is fetched ahead."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

BLOCK = 256 << 10
"""Bytes that are fetched at least. Most headers, directories and small tensors fit."""
_AHEAD = 16


class ObjectVersion(NamedTuple):
    """A file as it was listed: its key, and its version (an ETag or a time; empty if unknown)."""

    key: str
    version: str


Key = tuple[ObjectVersion, int]
"""A file and the number of a block in it."""
Fetch = Callable[[ObjectVersion, int, int], bytes | memoryview]
Block = bytes | memoryview
"""The bytes of a block, fewer where the file ends in it."""


class BlockCache:
    """What was read last of some files, for all threads.

    ``fetch`` reads a file from one offset to another (fewer bytes where it ends). Each run of
    blocks that is missing is one request; whoever asks for a block that is on its way waits for it.
    """

    def __init__(self, fetch: Fetch, capacity: int = 16 << 20) -> None:
        self.capacity = capacity
        self._fetch = fetch
        self._kept: OrderedDict[Key, Future[Block]] = OrderedDict()
        self._lock = threading.Lock()
        self._queue: deque[Key] = deque()
        self._unread: set[Key] = set()
        self._pool: ThreadPoolExecutor | None = None

    def read_into(self, file: ObjectVersion, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset``; return the bytes there are. Raises as ``fetch`` does."""
        if not buffer:
            return 0
        numbers = range(offset // BLOCK, (offset + len(buffer) - 1) // BLOCK + 1)
        done = 0
        for number, future in zip(numbers, self._futures(file, numbers), strict=True):
            begin = max(0, offset - number * BLOCK)
            piece = future.result()[begin : begin + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def expect(self, spans: Iterable[tuple[ObjectVersion, int, int]]) -> None:
        """Fetch what is read next ahead, several blocks at a time: file, offset and bytes of each.

        Spans longer than a block are left out: they are requests of their own.
        """
        keys = [
            (file, number)
            for file, offset, nbytes in spans
            if 0 < nbytes <= BLOCK
            for number in range(offset // BLOCK, (offset + nbytes - 1) // BLOCK + 1)
        ]
        with self._lock:
            self._queue = deque(dict.fromkeys([*keys, *self._queue]))
        self._fetch_ahead()

    def clear(self) -> None:
        """Forget everything: the files have changed."""
        with self._lock:
            self._kept.clear()
            self._unread.clear()
            self._queue.clear()

    def _futures(self, file: ObjectVersion, numbers: range) -> list[Future[Block]]:
        """Return the blocks of a file; those that nobody fetches yet are fetched here."""
        missing: list[int] = []
        with self._lock:
            for number in numbers:
                key = (file, number)
                if key not in self._kept:
                    self._kept[key] = Future()
                    missing.append(number)
                self._kept.move_to_end(key)
                self._unread.discard(key)
            futures = [self._kept[file, number] for number in numbers]
        for _, run in itertools.groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):
            run_numbers = [number for _, number in run]
            at = run_numbers[0] - numbers[0]
            self._fill(file, run_numbers, futures[at : at + len(run_numbers)])
        self._trim()
        self._fetch_ahead()
        return futures

    def _fill(self, file: ObjectVersion, numbers: list[int], futures: list[Future[Block]]) -> None:
        """Fetch neighbouring blocks with one request."""
        try:
            data = self._fetch(file, numbers[0] * BLOCK, (numbers[-1] + 1) * BLOCK)
        except BaseException as error:
            with self._lock:
                for number in numbers:
                    self._kept.pop((file, number), None)
                    self._unread.discard((file, number))
            for future in futures:
                future.set_exception(error)
            raise
        if len(futures) == 1:
            futures[0].set_result(data)
            return
        for place, future in enumerate(futures):  # copies: a view would keep all of them in memory
            future.set_result(bytes(data[place * BLOCK : (place + 1) * BLOCK]))

    def _trim(self) -> None:
        with self._lock:
            while len(self._kept) * BLOCK > max(self.capacity, _AHEAD * BLOCK):
                key, _ = self._kept.popitem(last=False)
                self._unread.discard(key)

    def _fetch_ahead(self) -> None:
        """Keep some of the blocks that are expected on their way."""
        with self._lock:
            while self._queue and len(self._unread) < _AHEAD:
                file, number = self._queue.popleft()
                if (file, number) in self._kept:
                    continue
                future = self._kept[file, number] = Future()
                self._unread.add((file, number))
                self._pool = self._pool or ThreadPoolExecutor(_AHEAD, "ckptool-ahead")
                self._pool.submit(self._fill_ahead, file, number, future)

    def _fill_ahead(self, file: ObjectVersion, number: int, future: Future[Block]) -> None:
        """Fetch one block that is expected; an error waits in it for whoever reads it."""
        with suppress(Exception):
            self._fill(file, [number], [future])
