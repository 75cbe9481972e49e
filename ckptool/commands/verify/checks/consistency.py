"""What in a checkpoint contradicts something else: ranks, replicas, markers, configs, checksums.

``integrity.json`` is ``{"algorithm": "sha256", "files": {name: hexadecimal digest}}`` and names all
files beside it but itself (megatron-core 0.20, ``--verify-integrity``). ``checklist.chk``, which
Meta's llama weights come with, is what ``md5sum`` prints: a digest and a name a line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.commands.keymap.model_config import CONFIG, config_problems, read_beside
from ckptool.commands.open import Survey
from ckptool.commands.verify.findings import conflict_problems
from ckptool.core.catalog import Catalog, TensorEntry, coverage_problem, flat_name
from ckptool.engine.check.replicas import differing_replicas
from ckptool.errors import UNCODED, CkptoolError, Problem, UsageError
from ckptool.formats.base import Format
from ckptool.formats.writing import NOT_CARRIED, select_plain
from ckptool.serialization.source import Source, read_metadata, require
from ckptool.storage.local import Files
from ckptool.storage.url import Location


def catalog_problems(catalog: Catalog) -> list[Problem]:
    """Return contradictions between ranks, gaps, odd names, values not written, and remarks."""
    entries = catalog.tensors.values()
    gaps = (coverage_problem(entry) for entry in entries)
    paths = {entry.name: flat_name(entry.path) for entry in entries}
    _, unwritten = select_plain(catalog)
    remarks = [p if isinstance(p, Problem) else Problem(p, "note") for p in catalog.notes]
    for remark in remarks:
        remark.code = "note" if remark.code == UNCODED else remark.code
    return [
        *conflict_problems(catalog),
        *(gap for gap in gaps if gap is not None),
        *(
            Problem(f"{name}: its path is {path!r}", "name-mismatch", tensor=name)
            for name, path in paths.items()
            if path != name
        ),
        *(p for p in unwritten if isinstance(p, Problem) and p.code == NOT_CARRIED),
        *remarks,
    ]


def replica_problems(entries: Iterable[TensorEntry], source: Files) -> list[Problem]:
    """Return the copies of one chunk that differ, or that cannot be read."""
    problems: list[Problem] = []
    for entry in entries:
        try:
            problems += differing_replicas([entry], source)
        except CkptoolError as error:
            problems += error.problems
    return problems


def unnamed_latest(asked: Location, surveyed: Survey) -> list[Problem]:
    """Return that a run's folder that was asked for does not name its latest checkpoint.

    Frameworks write the name into a file of the run's folder, and resume by nothing else.
    """
    marker, step = surveyed.format.latest, surveyed.path
    if marker is None or not re.fullmatch(marker.folders, step.name):
        return []
    if asked not in step.parents or (step.parent / marker.file).exists():
        return []
    message = f"{step.parent}: no {marker.file} beside {step.name}"
    message += ", so trainers will not resume from it"
    return [Problem(message, "latest-missing", file=marker.file)]


_ADAPTER = "adapter_config.json"


def config_file_problems(source: Files, row: Format, catalog: Catalog) -> list[Problem]:
    """Return that the config.json of a model's folder is missing, or does not fit the tensors."""
    if row.config is None:
        return []
    if CONFIG in source.files:
        try:
            return config_problems(read_beside(source, CONFIG), catalog)
        except UsageError as error:
            return [Problem(str(error), "metadata-unreadable", file=CONFIG)]
    if _ADAPTER in source.files:
        return [Problem(_adapter_note(source), "base-model-missing", file=_ADAPTER)]
    if row.config == "required":
        message = f"{CONFIG} not found: the model of these tensors is unknown"
        return [Problem(message, "config-missing")]
    return []


def _adapter_note(source: Files) -> str:
    try:
        base = read_beside(source, _ADAPTER).get("base_model_name_or_path")
    except UsageError:
        base = None
    name = f", {json.dumps(base)}" if isinstance(base, str) and base else ""
    return f"an adapter; its base model{name} is not in this folder"


LISTED = "integrity.json"
CHECKLIST = "checklist.chk"
_MD5_LINE = re.compile(r"([0-9a-fA-F]{32})\s+\*?(\S+)")
_ALGORITHM = "sha256"
_BLOCK = 1 << 22


def integrity_problems(source: Source) -> list[Problem]:
    """Return the listed files that are missing, or whose bytes are not those that were listed.

    Every listed file is read once. A remark where the list names another algorithm: it is unknown.
    """
    return [*_listed_by_megatron(source), *_listed_by_md5sum(source)]


def _listed_by_md5sum(source: Source) -> list[Problem]:
    if CHECKLIST not in source.files:
        return []
    text = read_metadata(source, CHECKLIST).decode("utf-8", "replace")
    lines = [_MD5_LINE.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    if not all(lines):
        message = f"{CHECKLIST}: not a list of MD5 digests"
        return [Problem(message, "index-unreadable", file=CHECKLIST)]
    files = {line[2]: line[1].lower() for line in lines if line is not None}
    return list(_differing(source, files, CHECKLIST, "md5"))


def _listed_by_megatron(source: Source) -> list[Problem]:
    if LISTED not in source.files:
        return []
    try:
        content = json.loads(read_metadata(source, LISTED))
    except (ValueError, RecursionError):
        content = None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not isinstance(content, dict):
        return [Problem(f"{LISTED}: no list of files", "index-unreadable", file=LISTED)]
    if content.get("algorithm") != _ALGORITHM:
        message = f"{LISTED}: {str(content.get('algorithm'))[:40]!r} is not supported; not checked"
        return [Problem(message, "note", file=LISTED)]
    return list(_differing(source, files, LISTED, _ALGORITHM))


def _differing(
    source: Source, files: dict[str, Any], listed: str, algorithm: str
) -> Iterator[Problem]:
    for file, expected in files.items():
        try:
            size = require(source, file, wanted_by=listed)
            digest = _digest(source, file, size, algorithm)
        except CkptoolError as error:
            yield from error.problems
            continue
        if digest != expected:
            message = f"{file}: {algorithm} {digest[:16]}..., expected"
            message += f" {str(expected)[:16]}... by {listed}"
            yield Problem(message, f"{algorithm}-mismatch", file=file)


def _digest(source: Source, file: str, size: int, algorithm: str) -> str:
    total = hashlib.new(algorithm, usedforsecurity=False)
    for start in range(0, size, _BLOCK):
        total.update(source.read(file, start, min(_BLOCK, size - start)))
    return total.hexdigest()
