"""Blocks of a store's files: neighboring reads share a request; next ones are fetched ahead."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from ckptool.storage.clients.client import AT_ONCE, ObjectVersion

BLOCK = 256 << 10
"""The least number of bytes to fetch. Most headers, directories and small tensors fit."""
CAPACITY = 16 << 20
"""Bytes of memory for what was read, unless a budget says otherwise."""


Key = tuple[ObjectVersion, int]
"""A file and the number of a block in it."""
Fetch = Callable[[ObjectVersion, int, int], bytes | memoryview]
Block = bytes | memoryview
"""The bytes of a part of a block, fewer if the file ends in it."""


class _Part(NamedTuple):
    """Bytes ``low`` to ``high`` of a block, in the block's own offsets."""

    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.high - self.low

    def holds(self, other: _Part) -> bool:
        """Return whether another part is within this one."""
        return self.low <= other.low and other.high <= self.high

    def joined(self, other: _Part) -> _Part:
        """Return the smallest part that contains this one and another."""
        return _Part(min(self.low, other.low), max(self.high, other.high))


_WHOLE = _Part(0, BLOCK)


class _Fetched(NamedTuple):
    """A part of a block, being fetched or available."""

    part: _Part
    data: Future[Block]


class BlockCache:
    """The most recently read blocks of some files, for all threads.

    ``fetch`` reads a file from one offset to another (fewer bytes if it ends). Each run of missing
    blocks is one request; of an announced block only what will be read is fetched. A thread that
    needs bytes that are being fetched waits for them.
    """

    def __init__(self, fetch: Fetch, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._fetch = fetch
        self._cache: OrderedDict[Key, _Fetched] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()
        self._expected: dict[Key, _Part] = {}
        self._queue: deque[Key] = deque()
        self._unread: set[Key] = set()
        self._pool: ThreadPoolExecutor | None = None

    def read_into(self, file: ObjectVersion, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset``; return the bytes there are. Raises as ``fetch`` does."""
        if not buffer:
            return 0
        done = 0
        for number, fetched in self._blocks(file, offset, offset + len(buffer)):
            begin = max(0, offset - number * BLOCK) - fetched.part.low
            piece = fetched.data.result()[begin : begin + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def expect(self, spans: Iterable[tuple[ObjectVersion, int, int]]) -> None:
        """Fetch the next reads ahead, several blocks at a time: file, offset and bytes of each.

        Spans longer than a block are skipped: they are requests of their own.
        """
        expected: dict[Key, _Part] = {}
        for file, offset, nbytes in spans:
            if 0 < nbytes <= BLOCK:
                for number, part in _parts(offset, offset + nbytes):
                    key = (file, number)
                    expected[key] = expected.get(key, part).joined(part)
        with self._lock:
            self._expected.update(expected)
            # the newest first, which are read next
            self._queue = deque(dict.fromkeys([*expected, *self._queue]))
        self._fetch_ahead()

    def clear(self) -> None:
        """Forget everything: the files have changed."""
        with self._lock:
            for key in list(self._cache):
                self._forget(key)
            self._expected.clear()
            self._queue.clear()

    def _blocks(self, file: ObjectVersion, start: int, end: int) -> list[tuple[int, _Fetched]]:
        """Return the parts of blocks that contain some bytes; fetch the missing ones."""
        blocks: list[tuple[int, _Fetched]] = []
        missing: list[tuple[int, _Fetched]] = []
        with self._lock:
            for number, part in _parts(start, end):
                key = (file, number)
                if not self._is_kept(key, part):
                    missing.append((number, self._begin(key, part)))
                self._cache.move_to_end(key)
                self._unread.discard(key)
                blocks.append((number, self._cache[key]))
        runs = list(_adjoining(missing))
        while runs:
            try:
                self._fill(file, runs.pop(0))
            except BaseException as error:
                for run in runs:  # others may wait for these
                    self._give_up(file, run, error)
                raise
        with self._lock:
            # less would drop what is fetched ahead before it is read
            while self._nbytes > max(self.capacity, AT_ONCE * BLOCK):
                self._forget(next(iter(self._cache)))
        self._fetch_ahead()
        return blocks

    def _is_kept(self, key: Key, part: _Part) -> bool:
        return key in self._cache and self._cache[key].part.holds(part)

    def _begin(self, key: Key, part: _Part) -> _Fetched:
        """Note, with the lock held, that a block is being fetched: the expected part, or all."""
        expected = self._expected.pop(key, _WHOLE)
        span = expected if expected.holds(part) else _WHOLE
        if key in self._cache:  # the same edge of two archives is read again for both
            span = span.joined(self._cache[key].part)
        fetched = _Fetched(span, Future())
        self._forget(key)
        self._cache[key] = fetched
        self._nbytes += fetched.part.nbytes
        return fetched

    def _forget(self, key: Key) -> None:
        """Drop a block, with the lock held."""
        self._unread.discard(key)
        if (fetched := self._cache.pop(key, None)) is not None:
            self._nbytes -= fetched.part.nbytes

    def _fill(self, file: ObjectVersion, run: Sequence[tuple[int, _Fetched]]) -> None:
        """Fetch adjoining parts of blocks with one request."""
        (first, begin), (last, end) = run[0], run[-1]
        start = first * BLOCK + begin.part.low
        try:
            data = self._fetch(file, start, last * BLOCK + end.part.high)
        except BaseException as error:
            self._give_up(file, run, error)
            raise
        for number, fetched in run:
            at = number * BLOCK + fetched.part.low - start
            piece = data[at : at + fetched.part.high - fetched.part.low]
            # copies: a view would keep the blocks of the whole run in memory
            fetched.data.set_result(piece if len(run) == 1 else bytes(piece))

    def _give_up(
        self, file: ObjectVersion, run: Sequence[tuple[int, _Fetched]], error: BaseException
    ) -> None:
        """Drop blocks that cannot be fetched, and pass the reason to waiting threads."""
        with self._lock:
            for number, _ in run:
                self._forget((file, number))
        for _, fetched in run:
            fetched.data.set_exception(error)

    def _fetch_ahead(self) -> None:
        """Keep some of the expected blocks being fetched."""
        with self._lock:
            while self._queue and len(self._unread) < AT_ONCE:
                file, number = key = self._queue.popleft()
                expected = self._expected.get(key)
                if expected is None or self._is_kept(key, expected):
                    continue
                self._pool = self._pool or ThreadPoolExecutor(AT_ONCE, "ckptool-ahead")
                fetched = self._begin(key, expected)
                try:
                    self._pool.submit(self._fill_ahead, file, number, fetched)
                except RuntimeError as error:  # no thread can be started: the reader fetches it
                    self._forget(key)
                    fetched.data.set_exception(error)
                    return
                self._unread.add(key)

    def _fill_ahead(self, file: ObjectVersion, number: int, fetched: _Fetched) -> None:
        """Fetch one expected block; an error is kept in it for its reader."""
        with suppress(Exception):
            self._fill(file, [(number, fetched)])


def _parts(start: int, end: int) -> Iterator[tuple[int, _Part]]:
    """Yield the blocks that contain some bytes of a file, with the part of each that does."""
    for number in range(start // BLOCK, (end - 1) // BLOCK + 1):
        first = number * BLOCK
        yield number, _Part(max(0, start - first), min(BLOCK, end - first))


def _adjoining(
    blocks: Iterable[tuple[int, _Fetched]],
) -> Iterator[list[tuple[int, _Fetched]]]:
    """Yield runs of blocks whose parts are adjacent."""
    run: list[tuple[int, _Fetched]] = []
    for number, fetched in blocks:
        if run:
            last, previous = run[-1]
            if number != last + 1 or previous.part.high < BLOCK or fetched.part.low:
                yield run
                run = []
        run.append((number, fetched))
    if run:
        yield run
