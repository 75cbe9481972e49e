"""Read spans of files once: compare their CRC-32, and look for NaN and infinite values.

Spans are cut into tiles that a few threads share, so that memory stays bounded and one large record
is no slower than many small ones.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptool.core.dtype import DType
from ckptool.engine.checksum import crc32, joined
from ckptool.engine.finite import all_finite
from ckptool.engine.sources import Files
from ckptool.engine.threads import share_jobs
from ckptool.errors import CkptoolError, Damaged, Problem

_TILE = 1 << 20


@dataclass(frozen=True, slots=True)
class View:
    """A run of a span that is a tensor's elements: ``start`` and ``nbytes`` in bytes.

    ``row`` is the bytes of one index of all dims but the last, 0 where there is only one dim.
    """

    start: int
    nbytes: int
    dtype: DType
    tensor: str
    row: int = 0


@dataclass(eq=False, slots=True)
class Span:
    """``nbytes`` of a file, or of what ``packing`` decodes to, that are read once.

    ``crc32`` is what the writer recorded, None where it did not; ``what`` is how errors call it.
    """

    file: str
    offset: int
    nbytes: int
    crc32: int | None
    what: str
    views: list[View] = field(default_factory=list)
    packing: Packing | None = None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Packing:
    """A compressed blob: ``nbytes`` of ``file``, one stream of ``codec`` (deflate or zstd)."""

    file: str
    offset: int
    nbytes: int
    codec: str


@dataclass(slots=True)
class Found:
    """``problems`` of the bytes, and the tensors with a value that is NaN or infinite.

    ``written`` says of each file with bytes that no checksum covers where the last of those ends
    that is not zero.
    """

    problems: list[Problem] = field(default_factory=list)
    not_finite: set[str] = field(default_factory=set)
    written: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_written(self, file: str, end: int) -> None:
        """A byte that is not zero ends there."""
        with self._lock:
            self.written[file] = max(end, self.written.get(file, 0))


@dataclass(frozen=True, slots=True)
class _Tile:
    span: Span
    start: int
    nbytes: int


def check_spans(
    spans: list[Span], source: Files, workers: int, progress: Callable[[int], None]
) -> Found:
    """Read every span once. ``progress`` is told of bytes as they are read."""
    found = Found()
    pieces: dict[int, list[tuple[int, int, int]]] = {id(span): [] for span in spans}

    def work(worker: _Worker, job: _Tile | list[Span]) -> None:
        blocks = [(job, worker.read(job))] if isinstance(job, _Tile) else worker.unpacked(job)
        try:
            for tile, data in blocks:
                _look(tile, data, found)
                if tile.span.crc32 is not None:
                    pieces[id(tile.span)].append((tile.start, tile.nbytes, crc32(data)))
                elif tile.span.packing is None:
                    found.note_written(tile.span.file, _written_end(tile, data))
                progress(tile.nbytes)
        except CkptoolError as error:
            found.problems.extend(error.problems)

    def guarded(worker: _Worker, job: _Tile | list[Span]) -> None:
        try:
            work(worker, job)
        except CkptoolError as error:
            found.problems.extend(error.problems)

    share_jobs(_jobs(spans), workers, lambda: _Worker(source), guarded)
    found.problems += [p for span in spans if (p := _crc_problem(span, pieces[id(span)]))]
    return found


def _jobs(spans: list[Span]) -> Iterator[_Tile | list[Span]]:
    packed: dict[Packing, list[Span]] = {}
    for span in spans:
        if span.packing is not None:
            packed.setdefault(span.packing, []).append(span)
        else:
            yield from _tiles(span)
    yield from packed.values()


def _tiles(span: Span) -> Iterator[_Tile]:
    for start in range(0, span.nbytes, _TILE):
        yield _Tile(span, start, min(_TILE, span.nbytes - start))


def _look(tile: _Tile, data: memoryview, found: Found) -> None:
    end = tile.start + tile.nbytes
    for view in tile.span.views:
        low, high = max(tile.start, view.start), min(end, view.start + view.nbytes)
        if low < high and not all_finite(data[low - tile.start : high - tile.start], view.dtype):
            found.not_finite.add(view.tensor)


def _written_end(tile: _Tile, data: memoryview) -> int:
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


class _Worker:
    """What one thread owns: its descriptors and its buffer."""

    def __init__(self, source: Files) -> None:
        self._reader = source.reader()
        self._buffer = memoryview(bytearray(_TILE))

    def close(self) -> None:
        self._reader.close()

    def read(self, tile: _Tile) -> memoryview:
        data = self._buffer[: tile.nbytes]
        self._reader.read_into(tile.span.file, tile.span.offset + tile.start, data)
        return data

    def unpacked(self, spans: list[Span]) -> Iterator[tuple[_Tile, memoryview]]:
        """The tiles of all spans of one blob, in the order in which they are decoded."""
        ordered = iter([t for span in sorted(spans, key=lambda s: s.offset) for t in _tiles(span)])
        tile = next(ordered, None)
        last = max(spans, key=lambda span: span.end)
        codec = last.packing.codec if last.packing else ""
        position = filled = 0
        for piece in self._decoded(spans[0]):
            at = 0
            while tile is not None and at < len(piece):
                wanted = tile.span.offset + tile.start + filled
                at = max(at, wanted - position)
                part = piece[at : at + tile.nbytes - filled]
                self._buffer[filled : filled + len(part)] = part
                at, filled = at + len(part), filled + len(part)
                if filled == tile.nbytes:
                    yield tile, self._buffer[:filled]
                    tile, filled = next(ordered, None), 0
            position += len(piece)
            if codec == "deflate" and position > last.end:
                message = f"{last.what} decodes to more than its {last.nbytes:,} bytes"
                raise Damaged(Problem(message, "codec-corrupt", file=last.file))
        if tile is not None:
            message = f"{tile.span.what} ends after {position:,} decoded bytes"
            raise Damaged(Problem(message, "codec-corrupt", file=tile.span.file))

    def _decoded(self, span: Span) -> Iterator[bytes]:
        packing = span.packing
        if packing is None:
            raise TypeError("a span that is not packed")
        try:
            yield from _DECODERS[packing.codec](self._packed(packing))
        except (zlib.error, ValueError) as error:
            message = f"{span.what}: the {packing.codec} data is corrupt: {error}"
            raise Damaged(Problem(message, "codec-corrupt", file=span.file)) from None

    def _packed(self, packing: Packing) -> Iterator[bytes]:
        for start in range(0, packing.nbytes, _TILE):
            piece = memoryview(bytearray(min(_TILE, packing.nbytes - start)))
            self._reader.read_into(packing.file, packing.offset + start, piece)
            yield bytes(piece)


def _inflated(pieces: Iterator[bytes]) -> Iterator[bytes]:
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    for piece in pieces:
        while piece:
            yield stream.decompress(piece, _TILE)
            piece = stream.unconsumed_tail
    yield stream.flush()


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    stream = zstandard.ZstdDecompressor().decompressobj(write_size=_TILE)
    try:
        for piece in pieces:
            for start in range(0, len(piece), _ZSTD_STEP):
                yield stream.decompress(piece[start : start + _ZSTD_STEP])
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


_ZSTD_STEP = 1 << 12
_DECODERS: dict[str, Callable[[Iterator[bytes]], Iterator[bytes]]] = {
    "deflate": _inflated,
    "zstd": _unzstd,
}
