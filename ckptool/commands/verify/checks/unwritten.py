"""Zeros from a page boundary on, as a crash leaves where a file was sized and never written.

Zeros that start with a tensor, or a row of one, are ordinary values; so are a flat tensor's that
starts at such a boundary, as what it was made of may. Only files without checksums are looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from ckptool.engine.check.content import PAGE, Hole
from ckptool.engine.check.spans import ByteSpan, View
from ckptool.errors import Problem

_LEAST = 256
"""Bytes of zeros at the end of a file that begin at a page boundary by no chance."""


def unwritten_problems(
    spans: Iterable[ByteSpan],
    written: Mapping[str, int],
    holes: Iterable[Hole],
    sizes: Mapping[str, int],
) -> Iterator[Problem]:
    """Yield a problem for each file that ends in such zeros, and for each with pages of them.

    Of the files without checksums that were read whole, ``written`` is the end of the last nonzero
    byte. ``sizes`` are the files'.
    """
    rows = _Rows(spans)
    yield from _ends(rows, written, sizes)
    yield from _pages(rows, holes)


class _Rows:
    """Tells which tensor's row is cut at a place in a file, by the ``spans`` that were read."""

    def __init__(self, spans: Iterable[ByteSpan]) -> None:
        self._spans: dict[str, list[ByteSpan]] = defaultdict(list)
        for span in sorted(spans, key=attrgetter("end")):
            self._spans[span.file].append(span)

    def end(self, file: str) -> int:
        """Return where the last tensor of a file ends."""
        return self._spans[file][-1].end

    def cut_at(self, file: str, place: int) -> View | None:
        """Return the tensor of which a row is cut; None if there is none."""
        spans = self._spans[file]
        at = bisect_left(spans, place, key=attrgetter("end"))
        for view in spans[at].views if at < len(spans) else ():
            nbytes = place - view.start
            if 0 < nbytes < view.nbytes and nbytes % (view.row or PAGE):
                return view
        return None


def _ends(rows: _Rows, written: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[Problem]:
    for file, end in written.items():
        start = -(-end // PAGE) * PAGE
        if sizes[file] - start < _LEAST or rows.end(file) != sizes[file]:
            continue
        view = rows.cut_at(file, start)
        if view is not None and start - end < view.dtype.itemsize:
            message = f"{file}: {sizes[file] - start:,} zeros from byte {start:,} to the end,"
            message += f" beginning at a page boundary inside {view.tensor}"
            yield Problem(message, "zeros-at-end", file=file)


def _pages(rows: _Rows, holes: Iterable[Hole]) -> Iterator[Problem]:
    """Yield a problem for each file with pages of zeros, but for those in columns of several rows.

    These are blocks of a sparse matrix.
    """
    places: dict[tuple[str, str, int], list[Hole]] = defaultdict(list)
    for hole in holes:
        view = rows.cut_at(hole.file, hole.start)
        if view is not None and rows.cut_at(hole.file, hole.stop) is not None:
            at, nbytes = hole.start - view.start, hole.stop - hole.start
            column = at % view.row if nbytes < view.row else -at
            places[hole.file, view.tensor, column].append(hole)
    by_file: dict[str, list[tuple[Hole, str]]] = defaultdict(list)
    for (file, tensor, _), of_place in places.items():
        by_file[file] += [(hole, tensor) for hole in of_place if len(of_place) == 1]
    for file, found in by_file.items():
        for hole, tensor in found[:1]:
            message = f"{file}: {hole.stop - hole.start:,} zeros from byte {hole.start:,} on, from"
            message += f" one page boundary to another inside {tensor}"
            message += f", and {len(found) - 1:,} more such" if len(found) > 1 else ""
            yield Problem(message, "zeros-inside", file=file, tensor=tensor)
