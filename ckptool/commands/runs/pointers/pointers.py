"""What names a step of a run: small files beside the steps, links, and a trainer's best.

A file that cannot be read, or ends too early, may name any step: that is an error, never silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path, PurePath

from ckptool.commands.model.adapter_config import ADAPTER_CONFIG
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.pointers.links import linked_steps, upwards
from ckptool.commands.runs.pointers.mentions import (
    MUST_NAME,
    SAYS_POINTER,
    StepNames,
    decode,
    unreadable,
)
from ckptool.commands.runs.records import recorded_best
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.runs.trainers import POINTERS
from ckptool.errors import CkptoolError
from ckptool.formats import single_file_suffixes
from ckptool.formats.companions import TRAINER_STATE
from ckptool.serialization.source import LARGEST
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location

_SMALL = 4096
_LARGEST = 64 << 20
_LIGHTNING = ".ckpt"
_READ_WITH = (".index.json", ADAPTER_CONFIG)
"""How files end that name what a checkpoint cannot be used without."""
_LATEST = re.compile(r"(?i)(?:.*[^a-z])?(?:latest|last|newest|current)(?:[^a-z].*)?")
_BEST = re.compile(rb'"best_model_checkpoint"\s*:\s*("(?:[^"\\]|\\.)*+"|null)?')


def find_pointers(run: Run, values: ReadOptions | None = None) -> dict[Location, list[str]]:
    """Return the steps that something in the run, or right above it, names; with what does.

    A pointer is a link, a small file such as ``latest`` (DeepSpeed, Megatron-LM), an index of
    shards, the config of an adapter, or the best of a trainer; a value in a checkpoint too if it is
    told how to read ``values``. Raises TransferError if one cannot be read.
    """
    names = StepNames(run)
    pairs = chain(linked_steps(run), _named_by_files(run, names), _best(run, names))
    if values is not None:
        pairs = chain(pairs, _recorded_best(run, names, values))
    pointers: dict[Location, list[str]] = {}
    for source, step in pairs:
        sources = pointers.setdefault(step.path, [])
        if source not in sources:
            sources.append(source)
    return pointers


def latest_source(sources: Iterable[str]) -> str | None:
    """Return which of the sources that name a step calls it the latest; None if none does."""
    return next((s for s in sources if _LATEST.fullmatch(s.rpartition("/")[2])), None)


def is_pointer(run: Run, source: str) -> bool:
    """Return whether what names a step is made to name one, as a trainer's file or a link is.

    Other small texts, such as notes and scripts, mention steps too, and may well be resumed from.
    """
    path, name = on_disk(run.path), source.rpartition("/")[2]
    is_link = path is not None and (path / source).is_symlink()
    return is_link or bool(re.fullmatch(POINTERS, name) or MUST_NAME.fullmatch(name))


def dangling_pointers(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the files by which trainers resume that name no step of the run, and what they name.

    Raises TransferError if one cannot be read.
    """
    names = StepNames(run)
    for file, size in _pointer_files(run):
        folder, _, name = file.rpartition("/")
        is_text = not name.endswith(tuple(single_file_suffixes()))
        if is_text and re.fullmatch(POINTERS, name) and _LATEST.fullmatch(name):
            words = (decode(_read(run.path / file, size)) or "").split()
            if len(words) == 1 and not any(True for _ in names.in_text(words[0], folder)):
                yield file, words[0]


def _named_by_files(run: Run, names: StepNames) -> Iterator[tuple[str, Step]]:
    for file, size in _pointer_files(run):
        data = _read(run.path / file, size)
        folder = file.rpartition("/")[0]
        for step in names.in_data(file, folder, data):
            yield file, step
    for path in _files_above(run):
        for step in names.in_text(decode(_read(path, None)) or "", ""):
            yield str(path), step


def _pointer_files(run: Run) -> Iterator[tuple[str, int]]:
    """Yield the files that may name a step, relative to the run, with their sizes in bytes."""
    entries = {run.relative(entry) for step in run.steps for entry in step.entries}
    homes = {place for entry in entries for place in upwards(entry.rpartition("/")[0])} | {""}
    is_inside = cache(lambda place: any(folder in entries for folder in upwards(place)))
    binary = tuple(single_file_suffixes())
    for file, size in run.source.files.items() if "" not in entries else ():
        folder, _, name = file.rpartition("/")
        if file in entries or is_inside(folder):
            may_point = name.endswith(_READ_WITH)
        elif re.fullmatch(POINTERS, name) is not None or name.endswith(_READ_WITH):
            may_point = name != TRAINER_STATE
        else:
            may_name = folder in homes or SAYS_POINTER.fullmatch(name) is not None
            may_point = may_name and size <= _SMALL and not name.endswith(binary)
        if may_point and size <= _LARGEST:
            yield file, size


def _files_above(run: Run) -> Iterator[Path]:
    """Yield the small files right above a run on a disk whose names say that they name a step."""
    if (path := on_disk(run.path)) is None:
        return
    try:
        neighbours = sorted(path.absolute().parent.iterdir())
    except OSError:
        return
    binary = tuple(single_file_suffixes())
    for file in neighbours:
        is_named = SAYS_POINTER.fullmatch(file.name) and not file.name.endswith(binary)
        if is_named and file.is_file() and file.stat().st_size <= _SMALL:
            yield file


def _read(path: Location, size: int | None) -> bytes:
    """Return a pointer's bytes, nothing if it is gone; TransferError if it cannot be read."""
    if size is not None and size > LARGEST:
        raise unreadable(path, f"it has {size:,} bytes, more than the {LARGEST:,} that are read")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    except (CkptoolError, OSError) as error:
        if isinstance(error, CkptoolError) and not path.exists():
            return b""
        raise unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    if size is not None and len(data) < size:
        raise unreadable(path, f"ends after {len(data):,} of {size:,} bytes")
    return data


def _recorded_best(run: Run, names: StepNames, options: ReadOptions) -> Iterator[tuple[str, Step]]:
    """Yield the best steps according to Lightning's newest checkpoint of each folder."""
    homes: set[PurePath] = set()
    for step in reversed(run.steps):
        if step.path.suffix != _LIGHTNING or step.home in homes:
            continue
        for best in recorded_best(step, options):
            homes.add(step.home)
            for best_step in names.in_text(best, "/".join(step.home.parts)):
                yield run.relative(step.path), best_step


def _best(run: Run, names: StepNames) -> Iterator[tuple[str, Step]]:
    """Yield the steps that transformers' Trainer calls its best, with the file that says so.

    Of a folder's steps only the newest that names one counts, beside the run's own file.
    """
    in_steps = {run.relative(step.path): step for step in reversed(run.steps)}
    states = {file.rpartition("/")[0]: file for file in run.source.files if _is_state(file)}
    homes: set[PurePath] = set()
    for folder in [*(folder for folder in states if folder not in in_steps), *in_steps]:
        step = in_steps.get(folder)
        if folder not in states or (step is not None and (not folder or step.home in homes)):
            continue
        file = states[folder]
        best = _best_in(run.path / file, run.source.files[file])
        if best is None:
            continue
        if step is not None:
            homes.add(step.home)
            folder = folder.rpartition("/")[0]
        for best_step in names.in_text(best, folder):
            yield file, best_step


def _is_state(file: str) -> bool:
    return file.rpartition("/")[2] == TRAINER_STATE


def _best_in(path: Location, size: int) -> str | None:
    """Return the best checkpoint that a state names; TransferError if it ends too early.

    It is searched, not parsed: what it says holds even if its end is missing.
    """
    data = _read(path, size)
    match = _BEST.search(data)
    value = match[1] if match else None
    is_gone = size > 0 and not data
    if value is None and not is_gone and not data[-_SMALL:].rstrip().endswith(b"}"):
        raise unreadable(path, "it ends early, before the best checkpoint")
    try:
        best = json.loads(value or b"null")
    except ValueError:
        raise unreadable(path, "its best checkpoint is no text of JSON") from None
    return None if best is None else str(best)
