"""Read spans of files once: compare their CRC-32, and look for NaN and infinite values.

Spans are cut into tiles that a few threads share, so that memory stays bounded and one large record
is no slower than many small ones. A file that is hashed too is read by one thread from end to end.

In every IEEE-like format the non-finite codes are the largest ones of each sign. Read as integers,
positive ones are found by the largest signed value, negative ones by the largest unsigned value.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from operator import eq
from typing import NamedTuple

from msgspec import Struct, field

from ckptool.core.dtype import DType
from ckptool.engine.check.spans import ByteSpan, SpanTile, span_jobs
from ckptool.engine.checksum import CrcPiece, crc32, join_crcs
from ckptool.engine.progress import Progress
from ckptool.engine.read.byte_reader import ByteSource
from ckptool.engine.read.containers import runs_of
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import CkptoolError, Problem
from ckptool.storage.files import Files, ReadSpan

PAGE = 4096
"""Bytes; what a file system did not write starts at a multiple of it, and ends at one."""


class Hole(NamedTuple):
    """Zeros of a file from ``start`` to ``stop``, both page boundaries beside other values."""

    file: str
    start: int
    stop: int


class ContentReport(Struct):
    """``problems`` of the bytes, and the tensors with a value that is NaN or infinite.

    ``written`` is, for each file with bytes that no checksum covers, the end of the last nonzero
    one; ``holes`` are zeros between other bytes of such files, from one page boundary to another;
    ``digests`` is the SHA-256 (hex) of each file that was read completely; ``nbytes`` were read in
    all.
    """

    problems: list[Problem] = field(default_factory=list)
    not_finite: set[str] = field(default_factory=set)
    written: dict[str, int] = field(default_factory=dict)
    holes: list[Hole] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, other: ContentReport) -> None:
        """Add the results of other spans."""
        self.problems += other.problems
        self.holes += other.holes
        self.not_finite |= other.not_finite
        self.digests |= other.digests
        self.nbytes += other.nbytes
        for file, end in other.written.items():
            self.note_written(file, end)

    def note_read(self, nbytes: int) -> None:
        """Note that bytes were read."""
        with self._lock:
            self.nbytes += nbytes

    def note_written(self, file: str, end: int) -> None:
        """Note that a nonzero byte ends there."""
        with self._lock:
            self.written[file] = max(end, self.written.get(file, 0))


def check_spans(
    spans: list[ByteSpan],
    source: Files,
    workers: int,
    progress: Progress,
    whole: Mapping[str, int] | None = None,
    *,
    announced: bool = False,
) -> ContentReport:
    """Read every span once. ``progress`` counts bytes as they are read, and so does the report.

    Files of ``whole``, which maps them to their sizes, are read from end to end and hashed. The
    reads may have been ``announced`` to the source before.
    """
    report = ContentReport()
    pieces: dict[int, list[CrcPiece]] = {id(span): [] for span in spans}

    def check(file: str | None, tiles: Iterator[SpanTile]) -> None:
        digest = None if file is None else hashlib.sha256()
        try:
            for tile in tiles:
                if digest is not None:
                    digest.update(tile.data)
                if tile.span is not None:
                    _check_tile(tile.span, tile, report, pieces[id(tile.span)])
                report.note_read(tile.nbytes)
        except CkptoolError as error:  # other jobs go on
            report.problems.extend(error.problems)
            return
        if file is not None and digest is not None:
            report.digests[file] = digest.hexdigest()

    # twice: a disk is asked for what the second ones read, ahead of the first
    jobs, announced_jobs = (span_jobs(spans, whole or {}, source.policy.tile) for _ in range(2))
    if announced:
        jobs = (job._replace(runs=()) for job in jobs)
    runs = (run for job in announced_jobs for needs in job.runs for run in runs_of(needs(1), set()))
    with planned(source, () if source.policy.by_request else runs):  # jobs announce those of stores
        read_tiles(ByteSource(source), jobs, check, workers, progress)
    report.problems += [p for span in spans if (p := _crc_problem(span, pieces[id(span)]))]
    return report


@contextmanager
def planned(source: Files, runs: Iterable[ReadSpan]) -> Iterator[None]:
    """Announce reads, if there are any, and end the announcement."""
    end = source.plan_reads(runs) if runs else None
    try:
        yield
    finally:
        if end is not None:
            end()


def _check_tile(
    span: ByteSpan, tile: SpanTile, report: ContentReport, pieces: list[CrcPiece]
) -> None:
    """Look for values that are odd, and note the checksum of a tile or its last nonzero byte."""
    # all views at once: one by one small ones cost many calls of numpy
    is_finite = _is_of_one_type(span) and all_finite(tile.data, span.views[0].dtype)
    for view in span.views:
        start = view.start - span.offset - tile.start
        data = tile.data[max(0, start) : max(0, start + view.nbytes)]
        if not is_finite and not all_finite(data, view.dtype):
            report.not_finite.add(view.tensor)
        if data and view.probe is not None and view.part is not None:
            view.probe.take(data, view.part, max(0, -start) // view.dtype.itemsize)
    if span.crc32 is not None:
        pieces.append((tile.start, tile.nbytes, crc32(tile.data)))
    elif span.packing is None:
        report.note_written(span.file, _written_end(span, tile))
        report.holes += _holes(span, tile)


def _is_of_one_type(span: ByteSpan) -> bool:
    """Return whether several views fill a span with elements of one type."""
    if len(span.views) < 2 or len({view.dtype for view in span.views}) > 1:
        return False
    ends = accumulate((view.nbytes for view in span.views), initial=span.offset)
    starts = (*(view.start for view in span.views), span.end)
    return all(map(eq, ends, starts))


def _written_end(span: ByteSpan, tile: SpanTile) -> int:
    """Return where in the file the last nonzero byte ends; 0 if all are zero."""
    data = tile.data
    nbytes = len(data) if data[-1] else len(bytes(data).rstrip(b"\0"))
    return span.offset + tile.start + nbytes if nbytes else 0


def _holes(span: ByteSpan, tile: SpanTile) -> Iterator[Hole]:
    """Yield the pages of zeros in a tile that have other values just before and after them."""
    at, data = span.offset + tile.start, tile.data
    first = -at % PAGE
    pages = (len(data) - first) // PAGE
    if pages < 1 or not span.views:
        return
    import numpy as np

    words = np.frombuffer(data, "u8", pages * PAGE // 8, first).reshape(pages, -1)
    empty = words[:, 0] == 0
    empty[empty] = ~words[empty].any(axis=1)
    size = span.views[0].dtype.itemsize
    for start, stop in np.flatnonzero(np.diff(empty, prepend=0, append=0)).reshape(-1, 2) * PAGE:
        start, stop = first + int(start), first + int(stop)
        if any(data[max(0, start - size) : start]) and any(data[stop : stop + size]):
            yield Hole(span.file, at + start, at + stop)


def _crc_problem(span: ByteSpan, pieces: list[CrcPiece]) -> Problem | None:
    if span.crc32 is None or sum(nbytes for _, nbytes, _ in pieces) != span.nbytes:
        return None  # what was not read completely: its file has a problem
    actual = join_crcs(pieces)
    if actual == span.crc32:
        return None
    tensors = {view.tensor for view in span.views}
    tensor = tensors.pop() if len(tensors) == 1 else None
    what = f"{span.what} ({tensor})" if tensor else span.what
    message = f"{what} has CRC-32 {actual:08x}, the writer recorded {span.crc32:08x}"
    return Problem(message, "crc-mismatch", file=span.file, tensor=tensor)


def can_be_not_finite(dtype: DType) -> bool:
    """Return whether the element type has codes for NaN or infinity."""
    return dtype.kind in ("float", "complex")


def all_finite(data: memoryview, dtype: DType) -> bool:
    """Return whether no element in ``data`` is NaN or infinite; True for types without these."""
    if not len(data) or not can_be_not_finite(dtype):
        return True
    import numpy as np

    first = dtype.part.first_special
    if first is None:
        return not (np.frombuffer(data, "u1") == dtype.only_nan).any()
    codes = np.frombuffer(data, f"u{dtype.swap}")
    sign = 1 << (8 * dtype.swap - 1)
    return int(codes.view(f"i{dtype.swap}").max()) < first and int(codes.max()) < first + sign
