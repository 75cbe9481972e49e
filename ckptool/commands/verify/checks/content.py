"""The places of tensors' content, so that it is read once, and what is odd in it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.open import Survey
from ckptool.core.box import Box, contiguous
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Container,
    EncodedBlob,
    Extent,
    Place,
    TensorEntry,
    places,
)
from ckptool.core.chunks import chunks_of
from ckptool.core.text import list_some
from ckptool.engine.check.content import all_finite, can_be_not_finite
from ckptool.engine.check.spans import ByteSpan, Packing, Part, Probe, View
from ckptool.engine.read.segments import span_of
from ckptool.engine.read.tensors import TensorSource, TensorTile, place_job
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.base import Format
from ckptool.serialization.source import expect_items
from ckptool.storage.files import Files

_TILE = 1 << 20

Shape = tuple[int, ...]
_Where = str | Packing
_Run = tuple[_Where, int, tuple[int, ...]]
_Locate = Callable[[Catalog], Catalog]


def located(
    format_: Format, source: Files, catalog: Catalog, chosen: Callable[[Container], bool]
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """Return the tensors with their chosen containers opened, and why some cannot be opened.

    They are without padding, which may have any values.
    """
    if (trim := format_.reading.trim) is not None:
        catalog = catalog.with_tensors({n: trim(entry) for n, entry in catalog.tensors.items()})
    if format_.reading.locate is None:
        return catalog.tensors, []
    locate = partial(format_.reading.locate, source)
    bare = replace(catalog, objects={})
    tensors = {name: _narrow(entry, chosen) for name, entry in catalog.tensors.items()}
    items = (at for entry in tensors.values() for at in places(entry) if isinstance(at, Container))
    expect_items(source, items)
    try:
        return _open(locate, bare.with_tensors(tensors))
    except CkptoolError:
        return _open_each(locate, bare, tensors)


def locate_whole(surveyed: Survey, names: Iterable[str]) -> dict[str, TensorEntry]:
    """Return whole tensors of a survey with their containers opened, as far as they can be."""
    if surveyed.catalog is None:
        return {}
    tensors = surveyed.catalog.tensors
    chosen = surveyed.catalog.with_tensors({name: tensors[name] for name in names})
    return located(surveyed.format, surveyed.source, chosen, lambda item: True)[0]


def locate_numbers(surveyed: Survey) -> dict[str, TensorEntry]:
    """Return the tensors of one element of a survey, such as step counters, as they are opened."""
    tensors = surveyed.catalog.tensors if surveyed.catalog else {}
    return locate_whole(surveyed, (name for name, e in tensors.items() if e.elements == 1))


def _open_each(
    locate: _Locate, bare: Catalog, entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """Return the same as ``located``, of tensors opened one by one, and then chunk by chunk."""
    problems: list[Problem] = []
    tensors: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        one = bare.with_tensors({name: entry})
        try:
            whole, notes = _open(locate, one)
            tensors |= whole
            problems += notes
        except CkptoolError:
            chunks: list[Chunk] = []
            for chunk in entry.chunks:
                part = one.with_tensors({name: replace(entry, chunks=(chunk,))})
                try:
                    chunks += _open(locate, part)[0][name].chunks
                except CkptoolError as error:
                    problems += error.problems
            tensors[name] = replace(entry, chunks=tuple(chunks))
    return tensors, problems


def _narrow(entry: TensorEntry, chosen: Callable[[Container], bool]) -> TensorEntry:
    """Return a tensor without the chunks whose containers are not chosen."""
    chunks = tuple(c for c in entry.chunks if not isinstance(c.at, Container) or chosen(c.at))
    return replace(entry, chunks=chunks)


def _open(locate: _Locate, catalog: Catalog) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """Return the tensors of a catalog, or those that they turn out to wrap, and notes."""
    if not any(map(_has_container, catalog.tensors.values())):
        return catalog.tensors, []
    opened = locate(catalog)
    return opened.tensors, [Problem(note, "note") for note in opened.notes[len(catalog.notes) :]]


def _has_container(entry: TensorEntry) -> bool:
    return any(isinstance(chunk.at, Container) for chunk in entry.chunks)


class Views(Struct):
    """The places of tensors' elements: runs of bytes, and scattered ones to be gathered."""

    runs: dict[_Where, list[View]] = field(default_factory=lambda: defaultdict(list))
    scattered: list[tuple[TensorEntry, Box, Place]] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[TensorEntry], probes: Mapping[str, Probe] | None = None) -> Views:
        """Return all places of all entries, each once; ``probes`` look at tensors of these names.

        A probe is shown elements that fill a run row by row, and no copies.
        """
        views, probes = cls(), probes or {}
        keys: set[object] = set()
        for entry in entries:
            chunks, probe = chunks_of(entry), probes.get(entry.name)
            run, shape = chunks.extent, entry.shape
            if run and 0 not in shape and views._add_run(entry, chunks.boxes[0], shape, run, probe):
                continue  # these bytes are no other tensor's
            for chunk in chunks:
                shape = chunk.box.shape
                for at in chunk.places:
                    key = at, shape
                    if 0 not in shape and key not in keys:
                        keys.add(key)
                        of_place = probe if at is chunk.at else None
                        views._add(entry, chunk.box, shape, at, of_place)
        return views

    def _add(
        self, entry: TensorEntry, box: Box, shape: Shape, at: Place, probe: Probe | None
    ) -> None:
        run = _run(at)
        if run is None or not self._add_run(entry, box, shape, run, probe):
            self.scattered.append((entry, box, at))

    def _add_run(
        self, entry: TensorEntry, box: Box, shape: Shape, run: _Run, probe: Probe | None
    ) -> bool:
        """Add a place if its elements fill a run of bytes; return whether they do."""
        where, start, strides = run
        dtype = entry.source_dtype
        filled = _fill(shape, strides, dtype.itemsize)
        if filled is None:
            return False
        row = shape[-1] * dtype.itemsize if len(shape) > 1 else 0
        is_part = probe and shape and filled.by_rows and Box.whole(entry.shape).contains(box)
        part = Part(entry.shape, box, dtype) if is_part else None
        self.runs[where].append(View(start, filled.nbytes, dtype, entry.name, row, part, probe))
        return True


def _run(at: Place) -> _Run | None:
    """Return where elements are stored unchanged: file or packing, start and strides, if so."""
    if isinstance(at, Extent) and not at.ops:
        return at.file, at.offset, at.strides
    if isinstance(at, EncodedBlob) and not at.ops:
        return Packing(at.file, at.offset, at.nbytes, at.codec), at.start, at.strides
    return None


class _Filled(NamedTuple):
    """The size of a run of elements, which are in it ``by_rows`` or in another order."""

    nbytes: int
    by_rows: bool


@lru_cache(maxsize=1024)
def _fill(shape: Shape, strides: tuple[int, ...], itemsize: int) -> _Filled | None:
    """Return the run that elements fill, None if they fill none; many tensors have one shape."""
    nbytes = span_of(shape, strides, itemsize)
    if math.prod(shape) * itemsize < nbytes:
        return None
    return _Filled(nbytes, contiguous(strides, shape, itemsize))


def attach(views: Views, spans: list[ByteSpan]) -> list[ByteSpan]:
    """Attach each view to the span that contains it; return new spans for the rest."""
    by_place: dict[_Where, list[ByteSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.offset):
        by_place[span.packing or span.file].append(span)
    new_spans: list[ByteSpan] = []
    for where, runs in views.runs.items():
        inside = by_place.get(where, [])
        starts = [span.offset for span in inside]
        rest = [view for view in runs if not _place(view, inside, starts)]
        if isinstance(where, str):
            new_spans += _own_spans(where, rest)
    return new_spans


def _place(view: View, spans: list[ByteSpan], starts: list[int]) -> bool:
    """Attach a view to the span that contains it; return whether there is one."""
    at = bisect_right(starts, view.start) - 1
    if at < 0 or view.start + view.nbytes > spans[at].end:
        return False
    spans[at].views.append(view)
    return True


def _own_spans(file: str, views: list[View]) -> list[ByteSpan]:
    """Return spans without a checksum: one for each tensor, for those that share bytes, and for
    small ones of one type that adjoin.
    """
    spans: list[ByteSpan] = []
    for view in sorted(views, key=lambda view: (view.start, -view.nbytes)):
        if not spans or not _belongs(view, spans[-1]):
            spans.append(ByteSpan(file, view.start, 0, None, f"{file}: {view.tensor}"))
        span = spans[-1]
        span.nbytes = max(span.nbytes, view.start + view.nbytes - span.offset)
        span.views.append(view)
    return spans


def _belongs(view: View, span: ByteSpan) -> bool:
    """Return whether a view shares bytes with a span, or is to be read with it."""
    is_next = view.start == span.end and view.dtype is span.views[-1].dtype
    is_near = view.start < span.end or (is_next and span.nbytes + view.nbytes <= _TILE)
    return is_near and (view.start - span.offset) % view.dtype.itemsize == 0


def scattered_not_finite(views: Views, source: Files) -> tuple[set[str], list[Problem]]:
    """Return the scattered tensors with NaN or infinity, and why some cannot be read."""
    names: set[str] = set()
    problems: list[Problem] = []

    def look(entry: TensorEntry, tiles: Iterator[TensorTile]) -> None:
        from ckptool.engine.read.gather import raw

        if entry.name in names:
            return
        try:
            if not all(all_finite(raw(tile.values), entry.source_dtype) for tile in tiles):
                names.add(entry.name)
        except CkptoolError as error:
            problems.extend(error.problems)

    jobs = [
        place_job(entry, at, box.shape, _TILE)
        for entry, box, at in views.scattered
        if can_be_not_finite(entry.source_dtype)
    ]
    if jobs:
        read_tiles(TensorSource(source), jobs, look, 1)
    return names, problems


def unchecked_problems(files: Sequence[str]) -> list[Problem]:
    """Return one remark on all files whose values no checksum covers."""
    message = f"{list_some(files, 1)}: no checksum stored; changed values cannot be detected"
    return [Problem(message, "no-checksum", file=files[0])]
