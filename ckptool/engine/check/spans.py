"""Runs of bytes that are read once.

What one thread reads spans with: tile by tile, file by file, decoded where they are packed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptool.core.dtype import DType
from ckptool.errors import Damaged, Problem
from ckptool.storage.local import Files


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


@dataclass(frozen=True, slots=True)
class Whole:
    """A file of ``nbytes`` that is read from end to end; ``spans`` lie in it one after another."""

    file: str
    nbytes: int
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Tile:
    """A piece of a span: ``start`` and ``nbytes`` in bytes."""

    span: Span
    start: int
    nbytes: int


Job = Tile | Whole | list[Span]
"""One tile, one file, or all spans of one packed blob."""


def tiles(span: Span, at_once: int) -> Iterator[Tile]:
    """A span piece by piece, ``at_once`` bytes each."""
    for start in range(0, span.nbytes, at_once):
        yield Tile(span, start, min(at_once, span.nbytes - start))


class SpanReader:
    """What one thread owns: its descriptors and its buffer."""

    def __init__(self, source: Files) -> None:
        self._reader = source.reader()
        self._tile = source.tile
        self._buffer = memoryview(bytearray(self._tile))

    def close(self) -> None:
        self._reader.close()

    def blocks(self, job: Job) -> Iterator[tuple[Tile | None, memoryview]]:
        """The bytes of a job in order, each block until the next; what is no span's has no tile."""
        if isinstance(job, Tile):
            yield job, self._read(job.span.file, job.span.offset + job.start, job.nbytes)
        elif isinstance(job, Whole):
            yield from self._whole(job)
        else:
            yield from self._unpacked(job)

    def _whole(self, job: Whole) -> Iterator[tuple[Tile | None, memoryview]]:
        position = 0
        for span in job.spans:
            yield from self._between(job.file, position, span.offset)
            for tile in tiles(span, self._tile):
                yield from self.blocks(tile)
            position = span.end
        yield from self._between(job.file, position, job.nbytes)

    def _between(self, file: str, low: int, high: int) -> Iterator[tuple[None, memoryview]]:
        for start in range(low, high, self._tile):
            yield None, self._read(file, start, min(self._tile, high - start))

    def _read(self, file: str, offset: int, nbytes: int) -> memoryview:
        data = self._buffer[:nbytes]
        self._reader.read_into(file, offset, data)
        return data

    def _unpacked(self, spans: list[Span]) -> Iterator[tuple[Tile, memoryview]]:
        """The tiles of all spans of one blob, in the order in which they are decoded."""
        in_order = sorted(spans, key=lambda span: span.offset)
        ordered = iter([tile for span in in_order for tile in tiles(span, self._tile)])
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
        for start in range(0, packing.nbytes, _PIECE):
            piece = memoryview(bytearray(min(_PIECE, packing.nbytes - start)))
            self._reader.read_into(packing.file, packing.offset + start, piece)
            yield bytes(piece)


def _inflated(pieces: Iterator[bytes]) -> Iterator[bytes]:
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
            for start in range(0, len(piece), _ZSTD_STEP):
                yield stream.decompress(piece[start : start + _ZSTD_STEP])
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


_PIECE = 1 << 20
_ZSTD_STEP = 1 << 12
_DECODERS: dict[str, Callable[[Iterator[bytes]], Iterator[bytes]]] = {
    "deflate": _inflated,
    "zstd": _unzstd,
}
