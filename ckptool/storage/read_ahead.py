"""Ask a disk early for what the page cache does not hold, and do not fill memory with it.

The kernel reads 128 KiB ahead unless the disk is set to more, which leaves a fast one idle most of
the time: where a file is read on from where the last read ended, some MiB are asked for instead
(``POSIX_FADV_WILLNEED``). What is cached says ``cachestat`` (Linux 6.5); before that nothing is
given up, for it may be others'.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

_STEP = 1 << 20
"""Bytes that are requested at a time."""
_PIECE = 256 << 10
"""Bytes of one such call: of more the kernel takes no more than the disk does at a time."""
_LOOK = 64 << 10
"""Bytes of a step that are looked at to tell whether it is cached."""
_MOST = 16 << 20
"""Bytes that are requested beyond what was read of a file."""
_GAP = 4 << 10
"""Bytes that may be left out between two reads, one of which goes on where the other ended."""
_MOST_UNREAD = 1 << 16
"""Steps that are noted as requested for and not read to their end."""
_SHORT = 16
"""Memory is short where less than the 16th part of it is free."""
_CACHESTAT = 451
_SMALL = 16 << 10
"""Bytes of a read that costs less than to call the kernel for it."""
_WINDOW = 64 << 10
"""Bytes that are read at once where small reads go on."""
_MOST_WINDOWS = 16
"""Files of which small reads may go on at the same time."""
SMALL_MEMORY = _WINDOW * _MOST_WINDOWS
"""Bytes of memory that ``SmallReads`` take at most."""


@dataclass(slots=True)
class _Stream:
    """Reads of a file that go on: how far they came, what was asked, and how far to be ahead.

    ``size`` is that of the file, in bytes.
    """

    reached: int
    asked: int
    size: int
    ahead: int = 0

    def goes_on(self, offset: int) -> bool:
        """Return whether a read continues it; threads take turns, so it may come late."""
        return self.reached - _MOST <= offset <= self.reached + _GAP


@dataclass(slots=True)
class _Window:
    """``nbytes`` of a file that are kept from ``start``; ``again`` counts reads that went on."""

    start: int
    nbytes: int
    reached: int
    memory: memoryview
    again: int = 0

    def note(self, offset: int, nbytes: int) -> bool:
        """Note a read; return whether it is at least the third that went on from the one before.

        What lies between two is less than a page: to read it in vain costs less than a call. The
        second may be of a header, behind which nothing else is asked for.
        """
        near = 0 <= offset - self.reached <= _GAP
        self.again = self.again + 1 if near else 0
        return self.again > 1


class SmallReads:
    """Reads what lies behind a small read along with it, where such reads go on, for one thread.

    A tensor of a few KiB then costs a copy, not a call of the kernel.
    """

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def find(
        self, file: str, offset: int, nbytes: int, read: Callable[[str, int, memoryview], int]
    ) -> memoryview | None:
        """Return some bytes of a file until the next are asked for; None if they are to be read.

        Where the reads of the file go on, ``read`` fills memory as far as the file has bytes, and
        returns how many.
        """
        if nbytes > _SMALL:
            return None
        window = self._windows.get(file)
        if window is None:
            window = self._begin(file)
        at = offset - window.start
        if not 0 <= at <= window.nbytes - nbytes:
            goes_on = window.note(offset, nbytes)
            at, window.start, window.nbytes, window.reached = 0, offset, 0, offset + nbytes
            if goes_on:
                window.memory = window.memory or memoryview(bytearray(_WINDOW))
                window.nbytes = read(file, offset, window.memory)
            if window.nbytes < nbytes or not goes_on:
                return None
        window.reached = offset + nbytes
        return window.memory[at : at + nbytes]

    def _begin(self, file: str) -> _Window:
        """Return a window of a file that nothing was read of, in place of the oldest of many."""
        if len(self._windows) >= _MOST_WINDOWS:
            del self._windows[next(iter(self._windows))]
        window = self._windows[file] = _Window(0, 0, -_GAP - 1, memoryview(b""))
        return window


class ReadAhead:
    """What all threads read of the files of a folder.

    Where memory is short, steps that were not cached are given up once they were read: pages that
    are in use would have to go for them. Where memory is free they stay, and are read again fast.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._unread: dict[tuple[str, int], int] = {}
        self._cached: dict[str, bool] = {}

    def begin(self, descriptor: int, file: str, offset: int, nbytes: int) -> None:
        """Ask for bytes that are read now, and where reads go on for more and more after them.

        Of what it is asked for before, the kernel reads nothing ahead by itself, which would be
        taken for another's. Of small reads, such as of headers, it does.
        """
        # Without a lock: threads that meet here ask twice, which costs less than waiting.
        stream = self._streams.get(file)
        if stream is None or not stream.goes_on(offset):
            stream = self._streams[file] = _Stream(offset, offset, os.fstat(descriptor).st_size)
        else:
            stream.ahead = min(_MOST, 2 * stream.ahead or nbytes)
        stream.reached = max(stream.reached, offset + nbytes)
        start = stream.asked
        wanted = stream.reached + stream.ahead + (_STEP - 1 if nbytes >= _PIECE else 0)
        end = stream.asked = max(start, min(wanted // _STEP * _STEP, stream.size))
        if start < end:
            deque(self.ask(descriptor, file, start, end), maxlen=0)

    def expect(self, descriptor: int, file: str, offset: int, nbytes: int) -> None:
        """Ask for a few bytes of a file, unless the first that were expected of it are cached."""
        if file not in self._cached:
            self._cached[file] = cached_bytes(descriptor, offset, nbytes) != 0
        if not self._cached[file]:
            will_need(descriptor, offset, nbytes)

    def ask(self, descriptor: int, file: str, start: int, end: int) -> Iterator[int]:
        """Ask for some bytes of a file, yield how many at a time.

        The kernel is slow to take what is asked: other threads need not wait for it.
        """
        while start < end:
            step = start // _STEP
            nbytes = min(end, (step + 1) * _STEP) - start
            if ask(descriptor, start, nbytes):
                if len(self._unread) >= _MOST_UNREAD:  # left by reads of a part of each
                    self._unread.clear()
                self._unread[file, step] = nbytes
            start += nbytes
            yield nbytes

    def end(self, descriptor: int, file: str, offset: int, nbytes: int) -> None:
        """Give up the steps that are read to their end now, where memory is short."""
        if not self._unread:
            return
        end = offset + nbytes
        for step in range(offset // _STEP, -(-end // _STEP)):
            start = step * _STEP
            with self._lock:
                left = self._unread.pop((file, step), None)
                if left is None:
                    continue
                left -= min(end, start + _STEP) - max(offset, start)
                if left > 0:
                    self._unread[file, step] = left
            if left <= 0 and memory_is_short():
                _advise(descriptor, start, _STEP, os.POSIX_FADV_DONTNEED)


def ask_aside(asked: Generator[int, None, None]) -> Callable[[], None]:
    """Ask on a thread of its own, some bytes at a time, until no memory is to spare for more.

    Returns what ends that.
    """
    stop = threading.Event()

    def work() -> None:
        left = spare_memory()
        with closing(asked):
            for nbytes in asked:
                left -= nbytes
                if left <= 0 or stop.is_set():
                    return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def ask(descriptor: int, offset: int, nbytes: int) -> bool:
    """Have some bytes of a file read into the page cache; return whether it had none of them.

    Where it has the first of them it is left to the kernel: to ask for all costs a tenth of reading
    them.
    """
    first = min(_LOOK, nbytes)
    cached = cached_bytes(descriptor, offset, first)
    if cached is not None and cached >= first:
        return False
    cached = cached_bytes(descriptor, offset, nbytes)
    for start in range(offset, offset + nbytes, _PIECE):
        piece = min(_PIECE, offset + nbytes - start)
        will_need(descriptor, start, piece)
    return cached == 0


def will_need(descriptor: int, offset: int, nbytes: int) -> None:
    """Have some bytes of a file read into the page cache."""
    _advise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)


def _advise(descriptor: int, offset: int, nbytes: int, advice: int) -> None:
    """Tell the kernel; a file system or a sandbox that takes no advice reads all the same.

    So does who reads what no file has, as damaged metadata may say: reading tells of that.
    """
    with suppress(OSError, OverflowError):
        os.posix_fadvise(descriptor, offset, nbytes, advice)


_libc = ctypes.PyDLL(None)  # to let other threads run for so short a call costs more than it
_Span, _Pages = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cached_bytes(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Return how many bytes of some of a file are in the page cache; None where nobody says it.

    ``cachestat`` fills five counts of pages, the first of those that are cached.
    """
    span, pages = _Span(offset, nbytes), _Pages()
    answer: int = _libc.syscall(_CACHESTAT, descriptor, span, pages, 0)
    return None if answer else pages[0] * _PAGE


def spare_memory() -> int:
    """Return how many bytes may be read long before they are needed."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free // 8, 4 << 30)


def memory_is_short() -> bool:
    """Return whether what is read takes memory that other files are cached in."""
    return os.sysconf("SC_AVPHYS_PAGES") * _SHORT < os.sysconf("SC_PHYS_PAGES")
