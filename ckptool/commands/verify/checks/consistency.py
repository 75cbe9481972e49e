"""Contradictions within a checkpoint: between ranks, replicas, markers, configs, checksums.

``integrity.json`` is ``{"algorithm": "sha256", "files": {name: hexadecimal digest}}`` and names all
files beside it but itself (megatron-core 0.20, ``--verify-integrity``). ``checklist.chk``, which
comes with Meta's llama weights, is the output of ``md5sum``: a digest and a name per line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from ckptool.commands.model.adapter_config import (
    ADAPTER_CONFIG,
    adapter_problems,
    is_of_lora,
    method_of,
)
from ckptool.commands.model.config import config_problems
from ckptool.commands.model.records import CONFIG, Record, read_beside
from ckptool.core.catalog import Catalog, TensorEntry, flat_name
from ckptool.core.chunks import chunks_of
from ckptool.core.sharding.coverage import coverage_problem, lone_rank_problem
from ckptool.engine.check.replicas import differing_replicas
from ckptool.errors import UNCODED, CkptoolError, Damaged, Problem
from ckptool.formats.base import Format, LatestMarker
from ckptool.formats.writing import select_plain
from ckptool.serialization.source import (
    Source,
    file_digest,
    parse_json_object,
    read_metadata,
    require,
)
from ckptool.serialization.state_dict.values import NOT_CARRIED
from ckptool.storage.files import Files
from ckptool.storage.url import Location


def catalog_problems(catalog: Catalog) -> Iterator[Problem]:
    """Yield contradictions between ranks, gaps, odd names, unwritten values, and remarks."""
    entries = catalog.tensors.values()
    yield from conflict_problems(catalog)
    gaps = list(filter(None, map(coverage_problem, entries)))
    yield from filter(None, [lone_rank_problem(entries, gaps), *gaps])
    inner = (entry for entry in entries if entry.path)  # a file may be one tensor, without a path
    for name, path in ((entry.name, flat_name(entry.path)) for entry in inner):
        if path != name:
            yield Problem(f"{name}: its path is {path!r}", "name-mismatch", tensor=name)
    _, unwritten = select_plain(catalog)
    yield from (p for p in unwritten if isinstance(p, Problem) and p.code == NOT_CARRIED)
    for note in catalog.notes:
        remark = note if isinstance(note, Problem) else Problem(note)
        yield remark.recoded("note") if remark.code == UNCODED else remark


def conflict_problems(catalog: Catalog) -> list[Problem]:
    """Return why names of a catalog cannot be read."""
    return [_conflict_problem(name, why) for name, why in catalog.conflicts.items()]


def _conflict_problem(name: str, why: str) -> Problem:
    if not isinstance(why, Problem):
        return Problem(why, "ranks-disagree", tensor=name)
    return why if why.tensor else why.of_tensor(name)


def replica_problems(entries: Iterable[TensorEntry], source: Files) -> Iterator[Problem]:
    """Yield the copies of one chunk that differ, or that cannot be read."""
    for entry in (entry for entry in entries if not chunks_of(entry).alone):
        try:
            yield from differing_replicas([entry], source)
        except CkptoolError as error:
            yield from error.problems


def unnamed_latest(asked: Location, step: Location, marker: LatestMarker) -> Iterator[Problem]:
    """Yield a problem if the folder of a run does not name its latest checkpoint.

    Frameworks write the name into a file of the run's folder, and resume only by that. A checkpoint
    that is one file is in the folder of its step (DeepSpeed without ZeRO).
    """
    is_step = asked in step.parents and re.fullmatch(marker.folders, step.name)
    if is_step and step.is_dir() and not (step.parent / marker.file).exists():
        message = f"{step.parent}: no {marker.file} beside {step.name}"
        message += ", so trainers will not resume from it"
        yield Problem(message, "latest-missing", file=marker.file)


def config_file_problems(source: Files, row: Format, catalog: Catalog) -> Iterator[Problem]:
    """Yield a problem if a model's config is missing, or does not match the tensors.

    It is config.json or, for an adapter, PEFT's adapter_config.json.
    """
    is_adapter = CONFIG not in source.files or any(map(is_of_lora, catalog.tensors))
    config = ADAPTER_CONFIG if ADAPTER_CONFIG in source.files and is_adapter else CONFIG
    try:
        if config == ADAPTER_CONFIG:
            yield from _adapter_problems(read_beside(source, ADAPTER_CONFIG), catalog)
        elif row.loading.config is not None and CONFIG in source.files:
            yield from config_problems(read_beside(source, CONFIG), catalog)
    except Damaged as error:
        yield from error.problems
    if config not in source.files and row.loading.config == "required":
        message = f"{CONFIG} not found: the model of these tensors is unknown"
        yield Problem(message, "config-missing")


def _adapter_problems(config: Record, catalog: Catalog) -> Iterator[Problem]:
    base, method = config.get("base_model_name_or_path"), method_of(config)
    name = f", {json.dumps(base)}" if isinstance(base, str) and base else ""
    message = f"an adapter ({method}); its base model{name} is not in this folder"
    yield Problem(message, "base-model-missing", file=ADAPTER_CONFIG)
    yield from adapter_problems(config, catalog.tensors)


LISTED = "integrity.json"
CHECKLIST = "checklist.chk"
_MD5_LINE = re.compile(r"([0-9a-fA-F]{32})\s+\*?(\S+)")
_ALGORITHM = "sha256"


def integrity_problems(source: Source) -> Iterator[Problem]:
    """Yield the listed files that are missing, or whose bytes do not match the list.

    Every listed file is read once. Yields a remark if the list names an unknown algorithm.
    """
    if LISTED in source.files:
        yield from _differing_from_list(source)
    if CHECKLIST in source.files:
        yield from _differing_from_checklist(source)


def _differing_from_checklist(source: Source) -> Iterator[Problem]:
    text = read_metadata(source, CHECKLIST).decode("utf-8", "replace")
    lines = [_MD5_LINE.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    if not all(lines):
        message = f"{CHECKLIST}: not a list of MD5 digests"
        yield Problem(message, "index-unreadable", file=CHECKLIST)
        return
    files = {line[2]: line[1].lower() for line in lines if line is not None}
    yield from _differing(source, files, CHECKLIST, "md5")


def _differing_from_list(source: Source) -> Iterator[Problem]:
    data = read_metadata(source, LISTED)
    content: dict[str, Any] = {}
    with suppress(Damaged):
        content = parse_json_object(data, LISTED)
    if not isinstance(content.get("files"), dict):
        yield Problem(f"{LISTED}: no list of files", "index-unreadable", file=LISTED)
    elif content.get("algorithm") != _ALGORITHM:
        message = f"{LISTED}: {str(content.get('algorithm'))[:40]!r} is not supported; not checked"
        yield Problem(message, "note", file=LISTED)
    else:
        yield from _differing(source, content["files"], LISTED, _ALGORITHM)


def _differing(
    source: Source, files: dict[str, Any], listed: str, algorithm: str
) -> Iterator[Problem]:
    for file, expected in files.items():
        try:
            require(source, file, wanted_by=listed)
            digest = file_digest(source, file, algorithm)
        except CkptoolError as error:
            yield from error.problems
            continue
        if digest != expected:
            message = f"{file}: {algorithm} {digest[:16]}..., expected"
            message += f" {str(expected)[:16]}... by {listed}"
            yield Problem(message, f"{algorithm}-mismatch", file=file)
