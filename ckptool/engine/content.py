"""Read spans of files once: compare their CRC-32, and look for NaN and infinite values.

Spans are cut into tiles that a few threads share, so that memory stays bounded and one large record
is no slower than many small ones. Files that are digested too are a thread's from end to end.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptool.engine.checksum import crc32, joined
from ckptool.engine.finite import all_finite
from ckptool.engine.sources import Files
from ckptool.engine.span_reader import SpanReader
from ckptool.engine.spans import Job, Packing, Span, Tile, Whole, tiles
from ckptool.engine.threads import share_jobs
from ckptool.errors import CkptoolError, Problem


@dataclass(slots=True)
class Found:
    """``problems`` of the bytes, and the tensors with a value that is NaN or infinite.

    ``written`` says of each file with bytes that no checksum covers where the last of those ends
    that is not zero; ``digests`` is the SHA-256 (hex) of each file that was read whole.
    """

    problems: list[Problem] = field(default_factory=list)
    not_finite: set[str] = field(default_factory=set)
    written: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_written(self, file: str, end: int) -> None:
        """A byte that is not zero ends there."""
        with self._lock:
            self.written[file] = max(end, self.written.get(file, 0))


def check_spans(
    spans: list[Span],
    source: Files,
    workers: int,
    progress: Callable[[int], None],
    whole: Mapping[str, int] | None = None,
) -> Found:
    """Read every span once. ``progress`` is told of bytes as they are read.

    Files of ``whole``, which have so many bytes, are read from end to end and digested.
    """
    found = Found()
    pieces: dict[int, list[tuple[int, int, int]]] = {id(span): [] for span in spans}

    def see(tile: Tile, data: memoryview) -> None:
        _look(tile, data, found)
        if tile.span.crc32 is not None:
            pieces[id(tile.span)].append((tile.start, tile.nbytes, crc32(data)))
        elif tile.span.packing is None:
            found.note_written(tile.span.file, _written_end(tile, data))

    def work(reader: SpanReader, job: Job) -> None:
        digest = hashlib.sha256() if isinstance(job, Whole) else None
        for tile, data in reader.blocks(job):
            if digest is not None:
                digest.update(data)
            if tile is not None:
                see(tile, data)
            progress(len(data))
        if digest is not None and isinstance(job, Whole):
            found.digests[job.file] = digest.hexdigest()

    def guarded(reader: SpanReader, job: Job) -> None:
        try:
            work(reader, job)
        except CkptoolError as error:
            found.problems.extend(error.problems)

    share_jobs(_jobs(spans, whole or {}, source.tile), workers, lambda: SpanReader(source), guarded)
    found.problems += [p for span in spans if (p := _crc_problem(span, pieces[id(span)]))]
    return found


def _jobs(spans: list[Span], whole: Mapping[str, int], at_once: int) -> Iterator[Job]:
    packed: dict[Packing, list[Span]] = {}
    inside: dict[str, list[Span]] = {file: [] for file in whole}
    for span in spans:
        if span.packing is not None:
            packed.setdefault(span.packing, []).append(span)
        elif span.file in inside:
            inside[span.file].append(span)
        else:
            yield from tiles(span, at_once)
    for file in sorted(whole, key=lambda file: -whole[file]):
        held, apart = _one_after_another(inside[file])
        yield Whole(file, whole[file], held)
        for span in apart:
            yield from tiles(span, at_once)
    yield from packed.values()


def _one_after_another(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """Spans that lie behind one another, and those that begin inside one of these."""
    held: list[Span] = []
    apart: list[Span] = []
    for span in sorted(spans, key=lambda span: span.offset):
        overlaps = bool(held) and span.offset < held[-1].end
        (apart if overlaps else held).append(span)
    return held, apart


def _look(tile: Tile, data: memoryview, found: Found) -> None:
    end = tile.start + tile.nbytes
    for view in tile.span.views:
        low, high = max(tile.start, view.start), min(end, view.start + view.nbytes)
        if low < high and not all_finite(data[low - tile.start : high - tile.start], view.dtype):
            found.not_finite.add(view.tensor)


def _written_end(tile: Tile, data: memoryview) -> int:
    """Where in the file the last byte ends that is not zero; 0 where all are."""
    held = len(data) if data[-1] else len(bytes(data).rstrip(b"\0"))
    return tile.span.offset + tile.start + held if held else 0


def _crc_problem(span: Span, pieces: list[tuple[int, int, int]]) -> Problem | None:
    if span.crc32 is None or sum(nbytes for _, nbytes, _ in pieces) != span.nbytes:
        return None
    actual = joined(pieces)
    if actual == span.crc32:
        return None
    tensors = {view.tensor for view in span.views}
    tensor = tensors.pop() if len(tensors) == 1 else None
    what = f"{span.what} ({tensor})" if tensor else span.what
    message = f"{what} has CRC-32 {actual:08x}, the writer recorded {span.crc32:08x}"
    return Problem(message, "crc-mismatch", file=span.file, tensor=tensor)
