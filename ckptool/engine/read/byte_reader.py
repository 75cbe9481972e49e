"""Read runs of bytes, whatever they are, and note what is to be checked of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from ckptool.core.catalog import Record
from ckptool.engine.read.segments import NotePiece
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tiles import Job, Subject, known_runs
from ckptool.storage.files import Files, ReadSpan

_GAP = 4 << 10
"""Bytes between two runs that are read with them: less than a call of the kernel costs.

From a store nothing is read but what was announced.
"""
_MOST_GAPS = 2 << 20
"""Bytes between runs that are read with them at a time: a small tensor may be in a million runs."""


class _Window(Struct):
    """Bytes ``start`` to ``end`` of a file that are read at once, to ``place`` in memory."""

    file: str
    start: int
    end: int
    place: int


def join(parts: Sequence[memoryview]) -> memoryview:
    """Return parts as one, which is not copied if it is the only one."""
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def ignore(record: Record, offset: int, data: memoryview) -> None:
    """Note nothing: the ``note`` of a reader whose records nobody checks."""


class ByteReader:
    """Reads runs of bytes for one thread, into memory that it uses again.

    ``note`` is called with each piece of a checksummed record that is read. ``sums`` get the
    checksums of all reads.
    """

    def __init__(
        self,
        source: Files,
        note: NotePiece = ignore,
        sums: ReadSums | None = None,
    ) -> None:
        self.files = source.reader()
        self.policy = source.policy
        self._gap = -1 if source.policy.by_request else _GAP
        self.note = note
        self._sums = sums
        self._memory = memoryview(b"")

    def close(self) -> None:
        """Close all files."""
        self.files.close()

    def memory(self, nbytes: int) -> memoryview:
        """Return so many bytes of memory, which the next call may return again."""
        if nbytes > len(self._memory):
            self._memory = memoryview(bytearray(nbytes))
        return self._memory[:nbytes]

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill the caller's memory; Damaged if the file ends before."""
        self.files.read_into(file, offset, buffer)
        if self._sums is not None:
            self._sums.note(file, offset, buffer)

    def read_close(self, runs: Iterable[ReadSpan]) -> list[memoryview]:
        """Return the bytes of some runs; those close in a file are read together.

        They are in memory that the next call may reuse.
        """
        window, windows, left = _Window("", 0, 0, 0), list[_Window](), _MOST_GAPS
        ordered = sorted([(*run, at) for at, run in enumerate(runs)])
        places = [0] * len(ordered)
        for file, start, nbytes, at in ordered:
            gap = start - window.end
            if file != window.file or gap > min(self._gap, left):
                window = _Window(file, start, start, window.place + window.end - window.start)
                windows.append(window)
            else:
                left -= max(0, gap)
            places[at] = window.place + start - window.start
            window.end = max(window.end, start + nbytes)
        memory = self.memory(window.place + window.end - window.start)
        for window in windows:
            part = memory[window.place : window.place + window.end - window.start]
            self.files.read_into(window.file, window.start, part)
        parts = [memoryview(b"")] * len(ordered)
        for file, start, nbytes, at in ordered:
            parts[at] = memory[places[at] : places[at] + nbytes]
            if self._sums is not None:  # not of the gaps: these are no tensor's
                self._sums.note(file, start, parts[at])
        return parts

    def read(self, file: str, offset: int, nbytes: int) -> memoryview:
        """Return bytes of a file, valid until the next are read."""
        data = self.memory(nbytes)
        self.read_into(file, offset, data)
        return data

    def run(self, file: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Read a run of bytes tile by tile."""
        tile = self.policy.tile
        for start in range(0, nbytes, tile):
            yield self.read(file, offset + start, min(tile, nbytes - start))


class ByteSource(Struct, frozen=True):
    """Files to read runs of bytes from."""

    files: Files

    @property
    def sides(self) -> tuple[Files]:
        """The files: one side."""
        return (self.files,)

    def reader(self) -> ByteReader:
        """Return the reader for one thread."""
        return ByteReader(self.files)


def byte_job(
    subject: Subject, file: str, offset: int, nbytes: int
) -> Job[Subject, ByteReader, memoryview]:
    """Return the job that reads a run of bytes."""
    run = (file, offset, nbytes)
    return Job(subject, lambda reader: reader.run(*run), [known_runs(run)], nbytes)
