"""What names a step of a run: small files beside the steps, links, and a trainer's best.

A file that cannot be read, or ends too early, may name any step: that is an error, never silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from msgspec import Struct

from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.links import linked_steps
from ckptool.commands.runs.mentions import SAYS_POINTER, StepNames, decode, unreadable
from ckptool.commands.runs.records import recorded_best
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.runs.trainers import POINTERS
from ckptool.errors import CkptoolError
from ckptool.formats import single_file_suffixes
from ckptool.formats.companions import TRAINER_STATE
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location

_SMALL = 4096
_LARGEST = 64 << 20
_PIECE = 1 << 20
_LIGHTNING = ".ckpt"
_INDEX = ".index.json"
_BEST = re.compile(rb'"best_model_checkpoint"\s*:\s*')
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


def find_pointers(run: Run) -> dict[Location, list[str]]:
    """Return the steps that something in the run, or right above it, names; with what does.

    A pointer is a link, a small file such as ``latest`` (DeepSpeed, Megatron-LM), an index of
    shards, or the best of a trainer. Raises TransferError if one cannot be read.
    """
    pointers: dict[Location, list[str]] = {}
    found: Iterator[tuple[str, Step]] = linked_steps(run)
    for source, step in (*found, *_named_by_files(run), *_best(run)):
        sources = pointers.setdefault(step.path, [])
        if source not in sources:
            sources.append(source)
    return pointers


def _named_by_files(run: Run) -> Iterator[tuple[str, Step]]:
    names = StepNames(run)
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
    around = {""}
    for entry in entries:
        around |= {str(parent) for parent in PurePosixPath(entry).parents}
    binary = tuple(single_file_suffixes())
    for file, size in run.source.files.items():
        folder, _, name = file.rpartition("/")
        inside = file in entries or not entries.isdisjoint(map(str, PurePosixPath(file).parents))
        is_known = re.fullmatch(POINTERS, name) is not None
        if inside:
            is_pointer = name.endswith(_INDEX)
        elif is_known or name.endswith(_INDEX):
            is_pointer = name != TRAINER_STATE
        else:
            may_name = (folder or ".") in around or folder in around or SAYS_POINTER.fullmatch(name)
            is_pointer = bool(may_name) and size <= _SMALL and not name.endswith(binary)
        if is_pointer and size <= _LARGEST and "" not in entries:
            yield file, size


def _files_above(run: Run) -> Iterator[Path]:
    """Yield the small files right above a run on a disk whose names say that they name a step."""
    if (path := on_disk(run.path)) is None:
        return
    try:
        beside = sorted(path.absolute().parent.iterdir())
    except OSError:
        return
    binary = tuple(single_file_suffixes())
    for file in beside:
        is_named = SAYS_POINTER.fullmatch(file.name) and not file.name.endswith(binary)
        if is_named and file.is_file() and file.stat().st_size <= _SMALL:
            yield file


def _read(path: Location, size: int | None) -> bytes:
    """Return a pointer's bytes, nothing if it is gone; TransferError if it cannot be read."""
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


def recorded_pointers(run: Run, options: ReadOptions) -> Iterator[tuple[str, Step]]:
    """Yield the best steps according to Lightning's newest checkpoint of each folder."""
    names = StepNames(run)
    told: set[object] = set()
    for step in reversed(run.steps):
        if step.path.suffix != _LIGHTNING or step.home in told:
            continue
        for best in recorded_best(step, options):
            told.add(step.home)
            for named in names.in_text(best, "/".join(step.home.parts)):
                yield step.path.name, named


class _State(Struct, frozen=True):
    """A ``trainer_state.json``, relative to the run, and the step that it lies in, if any."""

    file: str
    step: Step | None


def _best(run: Run) -> Iterator[tuple[str, Step]]:
    """Yield the steps that transformers' Trainer calls its best, with the file that says so.

    Of a folder's steps only the newest that names one counts, beside the run's own file.
    """
    names = StepNames(run)
    homes: dict[object, bool] = {}
    states = [_State(f, None) for f in run.source.files if _is_state_of_run(f, run)]
    states += [
        _State(f"{run.relative(step.path)}/{TRAINER_STATE}", step) for step in reversed(run.steps)
    ]
    for state in states:
        size = run.source.files.get(state.file)
        if size is None or (state.step is not None and homes.get(state.step.home)):
            continue
        best = _best_in(run.path / state.file, size)
        if best is None:
            continue
        if state.step is not None:
            homes[state.step.home] = True
        folder = state.file.rpartition("/")[0]
        around = folder if state.step is None else folder.rpartition("/")[0]
        for step in names.in_text(best, around):
            yield state.file, step


def _is_state_of_run(file: str, run: Run) -> bool:
    folder, _, name = file.rpartition("/")
    return name == TRAINER_STATE and all(run.relative(step.path) != folder for step in run.steps)


def _best_in(path: Location, size: int) -> str | None:
    """Return the best checkpoint that a state names; TransferError if it ends too early.

    It is searched, not parsed: it may be large, and what it says holds even if its end is missing.
    """
    tail, has_end = b"", False
    for piece in _pieces(path, size):
        data = tail + piece
        match = _BEST.search(data)
        if match is not None:
            value = _TEXT.match(data, match.end())
            if value is not None:
                return str(json.loads(value[0]))
            if data[match.end() : match.end() + 4] == b"null":
                return None
            if len(data) - match.end() > _SMALL:
                return None
        tail = data[match.start() if match else -_SMALL :]
        has_end = piece.rstrip().endswith(b"}")
    if not has_end:
        raise unreadable(path, "it ends early, before the best checkpoint")
    return None


def _pieces(path: Location, size: int) -> Iterator[bytes]:
    if (disk := on_disk(path)) is None:
        yield _read(path, size)
        return
    try:
        with open(disk, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError:
        yield b"}"
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
