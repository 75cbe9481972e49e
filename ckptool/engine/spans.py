"""Runs of bytes that are read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptool.core.dtype import DType


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
