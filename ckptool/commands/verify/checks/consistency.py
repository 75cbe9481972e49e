"""Contradictions within a checkpoint: between ranks, replicas, markers, configs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

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
from ckptool.serialization.state_dict.values import NOT_CARRIED
from ckptool.storage.files import Files
from ckptool.storage.url import Location


def catalog_problems(catalog: Catalog) -> Iterator[Problem]:
    """Yield contradictions between ranks, gaps, odd names, unwritten values, and remarks."""
    entries = catalog.tensors.values()
    yield from conflict_problems(catalog)
    if gaps := list(filter(None, map(coverage_problem, entries))):
        yield from filter(None, [lone_rank_problem(entries, gaps), *gaps])
    # a file may be one tensor, without a path
    named = [(name, e.path) for name, e in (catalog.tensors | catalog.objects).items() if e.path]
    for name, path in ((name, flat_name(path)) for name, path in named):
        if path != name:
            yield Problem(f"{name}: its path is {path!r}", "name-mismatch", tensor=name)
    _, unwritten = select_plain(catalog)
    yield from (p for p in unwritten if isinstance(p, Problem) and p.code == NOT_CARRIED)
    for note in catalog.notes:
        remark = note if isinstance(note, Problem) else Problem(note)
        yield remark.recoded("note") if remark.code == UNCODED else remark


def conflict_problems(catalog: Catalog) -> list[Problem]:
    """Return the problem of each name of a catalog that cannot be read."""
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


def unnamed_latest(path: Location, step: Location, marker: LatestMarker) -> Iterator[Problem]:
    """Yield a problem if the folder of a run, given as ``path``, does not name its latest step.

    Frameworks write the name into a file of the run's folder, and resume only by that. A checkpoint
    that is one file is in the folder of its step (DeepSpeed without ZeRO).
    """
    is_step = path in step.parents and re.fullmatch(marker.folders, step.name)
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
