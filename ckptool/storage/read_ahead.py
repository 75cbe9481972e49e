"""Request data early that is not in the page cache.

The kernel reads 128 KiB ahead unless the disk is set to more, which leaves a fast disk idle most of
the time: for sequential reads some MiB are requested instead (``POSIX_FADV_WILLNEED``), unless they
are cached, as ``cachestat`` shows (Linux 6.5).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress

from msgspec import Struct

_STEP = 1 << 20
"""Bytes that are requested at a time."""
_PIECE = 256 << 10
"""Bytes of one such call: the kernel reads at most one request of the disk per call."""
_LOOK = 64 << 10
"""Bytes of a step that are checked to see whether it is cached."""
_MOST = 16 << 20
"""Bytes that are requested beyond what was read of a file."""
_FURTHEST = 128 << 20
"""Bytes that are requested beyond what was read of a plan. Of more a disk reads what it reaches
first, and what is needed first waits until then, half a second.
"""
_PAUSE = 0.002
"""Seconds after which it is looked whether more was read."""
_GAP = 4 << 10
"""Bytes that may be skipped between two sequential reads."""
_CACHESTAT = 451


class _Stream(Struct):
    """Sequential reads of a file: how far they came, what was requested, how far to be ahead.

    ``size`` is that of the file, in bytes.
    """

    reached: int
    requested: int
    size: int
    ahead: int = 0

    def goes_on(self, offset: int) -> bool:
        """Return whether a read continues it; threads take turns, so it may come late."""
        return self.reached - _MOST <= offset <= self.reached + _GAP


class ReadAhead:
    """What all threads read of the files of a folder; ``read`` counts the bytes."""

    def __init__(self) -> None:
        self.read = 0
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._cached: dict[str, bool] = {}

    def begin(self, descriptor: int, file: str, offset: int, nbytes: int) -> None:
        """Request bytes that are read now, and for sequential reads more and more after them.

        Reading what was requested before starts no read-ahead of the kernel's own. Of a few
        small reads, such as of headers, nothing is requested: that is the kernel's.
        """
        with self._lock:
            self.read += nbytes
        # without a lock: threads that meet here ask twice, which costs less than waiting
        stream = self._streams.get(file)
        if stream is None or not stream.goes_on(offset):
            stream = self._streams[file] = _Stream(offset, offset, os.fstat(descriptor).st_size)
        else:
            stream.ahead = min(_MOST, 2 * stream.ahead or nbytes)
        stream.reached = max(stream.reached, offset + nbytes)
        start = stream.requested
        # whole steps: a large read asks for the one that it ends in, too
        goal = stream.reached + stream.ahead + (_STEP - 1 if nbytes >= _PIECE else 0)
        end = stream.requested = max(start, min(goal // _STEP * _STEP, stream.size))
        if start < end:
            deque(ask_in_steps(descriptor, start, end), maxlen=0)

    def expect(self, descriptor: int, file: str, offset: int, nbytes: int) -> None:
        """Request a few bytes of a file, unless the first bytes expected of it are cached."""
        if file not in self._cached:
            self._cached[file] = cached_bytes(descriptor, offset, nbytes) != 0
        if not self._cached[file]:
            will_need(descriptor, offset, nbytes)


def ask_in_steps(descriptor: int, start: int, end: int) -> Iterator[int]:
    """Request some bytes of a file, yield how many at a time; leave a few to the kernel.

    The kernel is slow to take requests: other threads need not wait for it.
    """
    if end - start < _LOOK:
        yield end - start
        return
    while start < end:
        nbytes = min(end, (start // _STEP + 1) * _STEP) - start
        _ask(descriptor, start, nbytes)
        start += nbytes
        yield nbytes


def ask_aside(requests: Generator[int, None, None], ahead: ReadAhead) -> Callable[[], None]:
    """Request bytes on a separate thread, some at a time, a little ahead of what is read of them.

    Returns a function that ends this.
    """
    stop = threading.Event()

    def work() -> None:
        spare = os.sysconf("SC_AVPHYS_PAGES") * _PAGE // 8  # what is read long before it is needed
        most, reached = min(_FURTHEST, spare), ahead.read
        with closing(requests):
            for nbytes in requests:
                reached += nbytes
                while reached - ahead.read > most and not stop.is_set():
                    stop.wait(_PAUSE)
                if stop.is_set():
                    return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def _ask(descriptor: int, offset: int, nbytes: int) -> None:
    """Read some bytes of a file into the page cache, unless the first of them are there.

    If they are, the rest is left to the kernel: requesting all costs a tenth of reading them.
    """
    first = min(_LOOK, nbytes)
    cached = cached_bytes(descriptor, offset, first)
    if cached is not None and cached >= first:
        return
    for start in range(offset, offset + nbytes, _PIECE):
        will_need(descriptor, start, min(_PIECE, offset + nbytes - start))


def request_missing(descriptor: int, offset: int, nbytes: int) -> None:
    """Read some bytes of a file into the page cache, unless all are there."""
    cached = cached_bytes(descriptor, offset, nbytes)
    if cached is None or cached < nbytes:
        will_need(descriptor, offset, nbytes)


def will_need(descriptor: int, offset: int, nbytes: int) -> None:
    """Read some bytes of a file into the page cache.

    A file system or sandbox that takes no advice still reads. So does a read beyond a file's end,
    by damaged metadata: reading then reports that.
    """
    with suppress(OSError, OverflowError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)


_libc = ctypes.PyDLL(None)  # releasing the GIL for so short a call costs more than the call
_Span, _Pages = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cached_bytes(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Return how many of some bytes of a file are in the page cache; None if unknown.

    ``cachestat`` fills five counts of pages, the first of those that are cached.
    """
    span, pages = _Span(offset, nbytes), _Pages()
    answer: int = _libc.syscall(_CACHESTAT, descriptor, span, pages, 0)
    return None if answer else pages[0] * _PAGE
