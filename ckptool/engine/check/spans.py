"""Runs of bytes that are read once: tile by tile, file by file, decoded if they are packed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct, field

from ckptool.core.box import Box
from ckptool.core.dtype import DType
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.tiles import Job, known_runs
from ckptool.errors import Damaged

_AT_ONCE = 64
"""Spans that are read at once if a tile has room for as many of each one's size."""


class Part(Struct, frozen=True):
    """A box of a tensor of ``shape`` whose elements, of type ``dtype``, fill a run row by row."""

    shape: tuple[int, ...]
    box: Box
    dtype: DType


class Probe(Protocol):
    """Looks at the elements of one tensor while they are read."""

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Look at elements of a part, the first of which is its ``first``-th.

        Runs come in any order, from several threads.
        """


class View(Struct, frozen=True):
    """A run of a span that is a tensor's elements: ``nbytes`` from ``start``, as a span's offset.

    ``row`` is the bytes of one index of all dims but the last, 0 if there is only one dim. A
    ``probe`` looks at the elements of the ``part`` that the run is.
    """

    start: int
    nbytes: int
    dtype: DType
    tensor: str
    row: int = 0
    part: Part | None = None
    probe: Probe | None = None


class ByteSpan(Struct, eq=False):
    """``nbytes`` of a file, or of the decoded ``packing``, that are read once.

    ``crc32`` is what the writer recorded, None if it did not; ``what`` is its name in errors.
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
        """Where the span ends, in bytes."""
        return self.offset + self.nbytes


class Packing(Struct, frozen=True):
    """A compressed blob: ``nbytes`` of ``file``, one stream of ``codec`` (deflate or zstd)."""

    file: str
    offset: int
    nbytes: int
    codec: str


class SpanTile(Struct, frozen=True):
    """Bytes of a span from ``start`` on; or of a file, outside its spans."""

    span: ByteSpan | None
    start: int
    data: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return len(self.data)


SpanJob = Job[str | None, ByteReader, SpanTile]
"""Its subject is the file that is read from end to end, None if there is none."""


def span_jobs(spans: Iterable[ByteSpan], whole: Mapping[str, int], limit: int) -> Iterator[SpanJob]:
    """Yield one tile of at most ``limit`` bytes, small spans, one file, or those of one blob each.

    Files of ``whole``, which maps them to their sizes, are read from end to end. One file comes
    after the other, as disks read ahead, also where tensors are cut into all of them.
    """
    packed: dict[Packing, list[ByteSpan]] = {}
    inside: dict[str, list[ByteSpan]] = {file: [] for file in whole}
    small = list[ByteSpan]()
    for span in sorted(spans, key=lambda span: (span.file, span.offset)):
        if span.packing is not None:
            packed.setdefault(span.packing, []).append(span)
        elif span.file in inside:
            inside[span.file].append(span)
        elif not 0 < span.nbytes <= limit // _AT_ONCE:
            yield from _tile_jobs(span, limit)
        else:
            # of one file: where that cannot be read, others still are
            if small and (len(small) == _AT_ONCE or small[-1].file != span.file):
                yield _small_job(small)
                small = []
            small.append(span)
    if small:
        yield _small_job(small)
    for file in sorted(whole, key=lambda file: -whole[file]):
        adjoining, overlapping = _split_overlapping(inside[file])
        runs_of_file = known_runs((file, 0, whole[file]))
        yield Job(file, partial(_read_file, file, whole[file], adjoining), [runs_of_file])
        for span in overlapping:
            yield from _tile_jobs(span, limit)
    for packing, inner in packed.items():
        stored = known_runs((packing.file, packing.offset, packing.nbytes))
        yield Job(None, partial(_read_packed, packing, inner), [stored])


def _split_overlapping(spans: Iterable[ByteSpan]) -> tuple[list[ByteSpan], list[ByteSpan]]:
    """Return consecutive spans, and those that begin inside one of these."""
    adjoining: list[ByteSpan] = []
    overlapping: list[ByteSpan] = []
    for span in sorted(spans, key=lambda span: span.offset):
        overlaps = bool(adjoining) and span.offset < adjoining[-1].end
        (overlapping if overlaps else adjoining).append(span)
    return adjoining, overlapping


def _tile_jobs(span: ByteSpan, limit: int) -> Iterator[SpanJob]:
    for start, nbytes in _cut(span, limit):
        run = known_runs((span.file, span.offset + start, nbytes))
        yield Job(None, partial(_read_part, span, start, nbytes), [run], nbytes)


def _small_job(spans: Sequence[ByteSpan]) -> SpanJob:
    runs = [(span.file, span.offset, span.nbytes) for span in spans]

    def read(reader: ByteReader) -> Iterator[SpanTile]:
        for span, data in zip(spans, reader.read_close(runs), strict=True):
            yield SpanTile(span, 0, data)

    return Job(None, read, [known_runs(*runs)], sum(span.nbytes for span in spans))


def _cut(span: ByteSpan, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the bytes of each tile of a span."""
    for start in range(0, span.nbytes, limit):
        yield start, min(limit, span.nbytes - start)


def _read_part(span: ByteSpan, start: int, nbytes: int, reader: ByteReader) -> Iterator[SpanTile]:
    for data in reader.run(span.file, span.offset + start, nbytes):
        yield SpanTile(span, start, data)
        start += len(data)


def _read_file(
    file: str, nbytes: int, spans: Sequence[ByteSpan], reader: ByteReader
) -> Iterator[SpanTile]:
    """Yield all bytes of a file in order, including those between its spans."""
    position = 0
    for span in spans:
        for data in reader.run(file, position, span.offset - position):
            yield SpanTile(None, 0, data)
        yield from _read_part(span, 0, span.nbytes, reader)
        position = span.end
    for data in reader.run(file, position, nbytes - position):
        yield SpanTile(None, 0, data)


def _read_packed(
    packing: Packing, spans: Sequence[ByteSpan], reader: ByteReader
) -> Iterator[SpanTile]:
    """Yield the tiles of all spans of one blob, in the order in which they are decoded.

    Raises Damaged if it decodes to more or fewer bytes, or not at all.
    """
    in_order, tile = sorted(spans, key=lambda span: span.offset), reader.policy.tile
    cuts = iter([(span, *cut) for span in in_order for cut in _cut(span, tile)])
    cut = next(cuts, None)
    last = max(spans, key=lambda span: span.end)
    position, filled, memory = 0, 0, reader.memory(tile)
    for piece in _decode(packing, spans[0], reader):
        at = 0
        while cut is not None and at < len(piece):
            span, start, nbytes = cut
            at = max(at, span.offset + start + filled - position)
            part = piece[at : at + nbytes - filled]
            memory[filled : filled + len(part)] = part
            at, filled = at + len(part), filled + len(part)
            if filled == nbytes:
                yield SpanTile(span, start, memory[:filled])
                cut, filled = next(cuts, None), 0
        position += len(piece)
        if packing.codec == "deflate" and position > last.end:
            message = f"{last.what} decodes to more than its {last.nbytes:,} bytes"
            raise Damaged(message, "codec-corrupt", file=last.file)
    if cut is not None:
        message = f"{cut[0].what} ends after {position:,} decoded bytes"
        raise Damaged(message, "codec-corrupt", file=cut[0].file)


def _decode(packing: Packing, span: ByteSpan, reader: ByteReader) -> Iterator[bytes]:
    try:
        yield from _DECODERS[packing.codec](_read_stored(packing, reader))
    except (zlib.error, ValueError) as error:
        message = f"{span.what}: the {packing.codec} data is corrupt: {error}"
        raise Damaged(message, "codec-corrupt", file=span.file) from None


def _read_stored(packing: Packing, reader: ByteReader) -> Iterator[bytes]:
    """Yield a blob as stored, in memory other than the reader's own."""
    for start in range(0, packing.nbytes, _PIECE):
        piece = memoryview(bytearray(min(_PIECE, packing.nbytes - start)))
        reader.read_into(packing.file, packing.offset + start, piece)
        yield bytes(piece)


def _inflate(pieces: Iterator[bytes]) -> Iterator[bytes]:
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    for piece in pieces:
        while piece:
            yield stream.decompress(piece, _PIECE)
            piece = stream.unconsumed_tail
    yield stream.flush()


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    stream = zstandard.ZstdDecompressor().decompressobj(write_size=_PIECE)
    try:
        for piece in pieces:
            # a little at a time: all that it decodes to is returned at once
            for start in range(0, len(piece), _ZSTD_STEP):
                yield stream.decompress(piece[start : start + _ZSTD_STEP])
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


_PIECE = 1 << 20
_ZSTD_STEP = 1 << 12
_DECODERS: dict[str, Callable[[Iterator[bytes]], Iterator[bytes]]] = {
    "deflate": _inflate,
    "zstd": _unzstd,
}
