"""What contradicts itself, or is lost without a word: replicas, ranks, markers, ends of files.

What contradicts itself in a catalog, and between the copies that ranks hold.

What says of a save which it is, and whether it was finished, where it should lie.

Files that end in zeros as a crash leaves them: sized, and never written to their end.

The checksums that lie beside a checkpoint's files.

``integrity.json`` is ``{"algorithm": "sha256", "files": {name: hexadecimal digest}}`` and names all
files beside it but itself (megatron-core 0.20, ``--verify-integrity``). ``checklist.chk``, which
Meta's llama weights come with, is what ``md5sum`` prints: a digest and a name a line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptool.commands.open import Survey
from ckptool.core.catalog import Catalog, TensorEntry, coverage_problem, flat_name
from ckptool.engine.check.replicas import differing_replicas
from ckptool.engine.check.spans import Span, View
from ckptool.errors import UNCODED, CkptoolError, Problem
from ckptool.formats.writing import NOT_CARRIED, plain_objects
from ckptool.serialization.source import Source, read_metadata, require
from ckptool.storage.local import Files
from ckptool.storage.url import Location


def catalog_problems(catalog: Catalog) -> list[Problem]:
    """Names that ranks contradict one another in, gaps, odd names, and a scan's remarks."""
    gaps = (coverage_problem(entry) for entry in catalog.tensors.values())
    remarks = [p if isinstance(p, Problem) else Problem(p, "note") for p in catalog.notes]
    for remark in remarks:
        remark.code = "note" if remark.code == UNCODED else remark.code
    conflicts = catalog.conflicts.values()
    return [
        *(p if isinstance(p, Problem) else Problem(p, "ranks-disagree") for p in conflicts),
        *(gap for gap in gaps if gap is not None),
        *_misnamed(catalog),
        *_not_carried(catalog),
        *remarks,
    ]


def _not_carried(catalog: Catalog) -> list[Problem]:
    """What convert and reshard say that they leave behind."""
    _, notes = plain_objects(catalog)
    return [note for note in notes if isinstance(note, Problem) and note.code == NOT_CARRIED]


def _misnamed(catalog: Catalog) -> list[Problem]:
    return [
        Problem(
            f"{entry.name}: its path is {flat_name(entry.path)!r}",
            "name-mismatch",
            tensor=entry.name,
        )
        for entry in catalog.tensors.values()
        if flat_name(entry.path) != entry.name
    ]


def replica_problems(entries: Iterable[TensorEntry], source: Files) -> list[Problem]:
    """Copies of one chunk that differ, or that cannot be read."""
    problems: list[Problem] = []
    for entry in entries:
        try:
            problems += differing_replicas([entry], source)
        except CkptoolError as error:
            problems += error.problems
    return problems


def unnamed_latest(asked: Location, found: Survey) -> list[Problem]:
    """Return that a run's folder that was asked for does not name its latest checkpoint.

    Frameworks write the name into a file of the run's folder, and resume by nothing else.
    """
    marker, run = found.format.latest, found.path.parent
    if marker is None or not re.fullmatch(marker.folders, found.path.name):
        return []
    if asked not in found.path.parents or (run / marker.file).exists():
        return []
    message = (
        f"{run}: no {marker.file} beside {found.path.name}, so trainers will not resume from it"
    )
    return [Problem(message, "latest-missing", file=marker.file)]


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
            message = f"{file}: {sizes[file] - start:,} zeros from byte {start:,} to the end,"
            message += f" beginning at a page boundary inside {view.tensor}"
            yield Problem(message, "zeros-at-end", file=file)


def _cut(span: Span, start: int, end: int) -> Iterator[View]:
    """The views of a span of which ``start`` is no beginning of a row, just behind a value."""
    for view in span.views:
        held = start - span.offset - view.start
        inside = 0 < held < view.nbytes and (not view.row or held % view.row)
        if inside and start - end < view.dtype.itemsize:
            yield view


LISTED = "integrity.json"
CHECKLIST = "checklist.chk"
_MD5_LINE = re.compile(r"([0-9a-fA-F]{32})\s+\*?(\S+)")
_ALGORITHM = "sha256"
_BLOCK = 1 << 22


def integrity_problems(source: Source) -> list[Problem]:
    """The files that are missing, or whose bytes are not those that were listed.

    Every listed file is read once. A remark where the list names another algorithm: it is unknown.
    """
    return [*_listed_by_megatron(source), *_listed_by_md5sum(source)]


def _listed_by_md5sum(source: Source) -> list[Problem]:
    if CHECKLIST not in source.files:
        return []
    text = read_metadata(source, CHECKLIST).decode("utf-8", "replace")
    lines = [_MD5_LINE.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    if not all(lines):
        return [
            Problem(f"{CHECKLIST}: not a list of MD5 digests", "index-unreadable", file=CHECKLIST)
        ]
    files = {line[2]: line[1].lower() for line in lines if line is not None}
    return list(_differing(source, files, CHECKLIST, "md5"))


def _listed_by_megatron(source: Source) -> list[Problem]:
    if LISTED not in source.files:
        return []
    try:
        listed = json.loads(read_metadata(source, LISTED))
    except (ValueError, RecursionError):
        listed = None
    files = listed.get("files") if isinstance(listed, dict) else None
    if not isinstance(files, dict) or not isinstance(listed, dict):
        return [Problem(f"{LISTED}: no list of files", "index-unreadable", file=LISTED)]
    if listed.get("algorithm") != _ALGORITHM:
        message = f"{LISTED}: {str(listed.get('algorithm'))[:40]!r} is not supported; not checked"
        return [Problem(message, "note", file=LISTED)]
    return list(_differing(source, files, LISTED, _ALGORITHM))


def _differing(
    source: Source, files: dict[str, Any], listed: str, algorithm: str
) -> Iterator[Problem]:
    for file, digest in files.items():
        try:
            size = require(source, file, wanted_by=listed)
            found = _digest(source, file, size, algorithm)
        except CkptoolError as error:
            yield from error.problems
            continue
        if found != digest:
            message = (
                f"{file}: {algorithm} {found[:16]}..., expected {str(digest)[:16]}... by {listed}"
            )
            yield Problem(message, f"{algorithm}-mismatch", file=file)


def _digest(source: Source, file: str, size: int, algorithm: str) -> str:
    total = hashlib.new(algorithm, usedforsecurity=False)
    for start in range(0, size, _BLOCK):
        total.update(source.read(file, start, min(_BLOCK, size - start)))
    return total.hexdigest()
