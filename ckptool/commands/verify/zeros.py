"""Files that end in zeros as a crash leaves them: sized, and never written to their end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptool.engine.spans import Span, View
from ckptool.errors import Problem

PAGE = 4096
"""Bytes; what a file system has not written begins at a multiple of it."""


def unwritten_ends(
    spans: Iterable[Span], written: Mapping[str, int], sizes: Mapping[str, int]
) -> Iterator[Problem]:
    """A problem for each file whose zeros begin with a page inside a tensor and go on to its end.

    ``written`` says where the last byte ends that is not zero, of files without checksums. Zeros
    that begin with a tensor, or a row of one, are values like any other.
    """
    last = {span.file: span for span in sorted(spans, key=lambda span: span.end)}
    by_file: dict[str, list[Span]] = {file: [] for file in written}
    for span in spans:
        by_file.get(span.file, []).append(span)
    for file, end in written.items():
        start = -(-end // PAGE) * PAGE
        if sizes[file] - start < PAGE or last[file].end != sizes[file]:
            continue
        view = next((v for span in by_file[file] for v in _cut(span, start, end)), None)
        if view is not None:
            message = f"{file}: {sizes[file] - start:,} zeros from byte {start:,} to its end, which"
            message += f" begin with a page in the midst of {view.tensor}"
            yield Problem(message, "zeros-at-end", file=file)


def _cut(span: Span, start: int, end: int) -> Iterator[View]:
    """The views of a span of which ``start`` is no beginning of a row, just behind a value."""
    for view in span.views:
        held = start - span.offset - view.start
        inside = 0 < held < view.nbytes and (not view.row or held % view.row)
        if inside and start - end < view.dtype.itemsize:
            yield view
