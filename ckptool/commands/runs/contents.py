"""Which files a step has, by what they are for, and which of these it lacks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache

from msgspec import Struct

from ckptool.commands.runs.names import SUFFIX, parse_name
from ckptool.commands.runs.steps import Run, Step, says_another
from ckptool.commands.runs.trainers import unfinished_mark, unwritten_last
from ckptool.errors import Damaged, NotFound
from ckptool.formats import latest_markers
from ckptool.serialization.file_roles import (
    is_beside_model,
    is_of_training,
    may_be_empty,
    role_of,
)
from ckptool.serialization.source import are_of_a_node, missing_files
from ckptool.storage.url import Location, within

_STATE = re.compile(
    r"(?i).+\.(?:pt|py?th|th|bin|pkl|pickle|ckpt|safetensors|npz|npy|msgpack|distcp|tar|joblib|state)"
    r"|\.metadata|(?:.*_)?(?:states?|progress|meta|metadata|ckpt)(?:_\d+)?\.(?:json|ya?ml|txt)"
    r"|(?:adapter_)?config\.json"  # without it transformers loads no model, and PEFT no adapter
)
_DCP = re.compile(r"__(\d+)_\d+\.distcp|\.metadata")
_DCP_FILES = "files of torch.distributed.checkpoint"
_WORLD = re.compile(r"world_size_(\d+)_rank_\d+|(?<=rank)[-_]?\d+[-_]of[-_](\d+)")
_SHARDS = re.compile(r"[-_.]?(?<!\d)\d+-of-\d+")
_OF_RANK = re.compile(r"(.*\D)(\d+)")
AT_ONCE = 1.0
"""Seconds: files that were written together, as by a copy, are not in the order of their times."""
_CORE = 1
"""How many earlier steps must have a file of a known role, before a later one must; else 2."""


def files_of(step: Step, run: Run) -> frozenset[str]:
    """Return the files of a step that training needs, each by a name that all its steps share."""
    shared_names: set[str] = set()
    for entry in step.entries:
        files = run.files_in(entry)
        role = parse_name(entry.name, is_folder="" not in files).role
        holders = within(entry, run.path).parts[len(step.home.parts) : -1]
        folders = (folder for folder in holders if not folder.isdecimal())  # any may have a replica
        label = "/".join([*folders, role]).strip("/")
        names = (name for name in files if name and not says_another(step, name, run.fixed))
        keys = (_key(name, step.number) for name in names)
        shared_names |= {f"{label}: {key}" if label else key for key in keys if key is not None}
        shared_names |= {label or "the file"} if "" in files else set()
    return frozenset(shared_names)


def model_parts(step: Step, run: Run) -> frozenset[str]:
    """Return the files of a step whose names say model, optimizer or average.

    Numbers in these names are left out: they count ranks, layers or something of the step.
    """
    files = (file for file in files_of(step, run) if not may_be_empty(file))
    return frozenset(re.sub(r"\d+", "#", file) for file in files)


@lru_cache(1 << 14)
def _key(file: str, number: int | None) -> str | None:
    """Return a file's name without format, shard and step number; None if training needs it not.

    What names the latest inside a step, as DeepSpeed's ``latest``, says what to resume from.
    """
    folder, _, name = file.rpartition("/")
    is_record = name.endswith(".json") and any(map(_is_of_training, (name, *folder.split("/"))))
    is_needed = is_record or _STATE.fullmatch(name) is not None or name in latest_markers()
    if not is_needed or (name.startswith(".") and name != ".metadata"):
        return None
    if _DCP.fullmatch(name):
        path = folder or _DCP_FILES
    else:
        stem = _WORLD.sub("rank", _SHARDS.sub("", re.sub(SUFFIX, "", name)))
        path = f"{folder}/{stem}" if folder else stem
    path = path.replace("pytorch_model", "model")
    names = ((part, parse_name(part, is_folder=True)) for part in path.split("/"))
    return "/".join(n.kind if n.position.number == number is not None else p for p, n in names)


def _is_of_training(name: str) -> bool:
    """Return whether a name says state of training: LeRobot's ``training_state/training_step``."""
    return is_of_training(name) or (role_of(name) == "record" and is_beside_model(name))


def kind_of(part: Location, step: Step, run: Run) -> Sequence[str]:
    """Return the names on a part's path below the step without their numbers, and their roles."""
    entry = next(entry for entry in step.entries if entry == part or entry in part.parents)
    holders = within(entry, run.path).parts[len(step.home.parts) : -1]
    names = *holders, *(within(part, entry).parts or (part.name,))
    entry_names = (parse_name(name, is_folder=False) for name in names)
    return tuple(text for name in entry_names for text in (name.kind, name.role))


def save_time(step: Step, run: Run) -> float | None:
    """Return when the last file that training needs was written, in seconds; None if unknown.

    Links do not count: what they lead to is another's.
    """
    times = []
    for entry in step.entries:
        head = run.relative(entry)
        for name in run.files_in(entry):
            file = f"{head}/{name}".strip("/")
            place = run.path / file
            if name and not _STATE.fullmatch(name.rpartition("/")[2]):
                continue
            with suppress(NotFound, OSError):
                if not place.is_symlink():
                    times.append(run.source.modified(file))
    return max(times, default=None) or None


def fingerprint_of(step: Step, run: Run) -> Sequence[str | None]:
    """Return a hash of names, sizes and times of each entry's files; None for one that is gone."""
    prints: list[str | None] = []
    for entry in step.entries:
        head = run.relative(entry)
        names = [f"{head}/{name}" if name else head for name in run.files_in(entry)]
        try:
            prints.append(run.source.fingerprint(names) if names else None)
        except (Damaged, NotFound):
            prints.append(None)
    return prints


def unfinished_reason(step: Step, run: Run) -> str | None:
    """Return why a step is still being written, or its save was never finished; None if neither."""
    for entry in step.entries:
        neighbours = _names_beside(step, entry, run)
        files = [name for name in run.files_in(entry) if name]
        mark = unfinished_mark(entry.name, files, neighbours)
        if mark is not None:
            return f"{mark} says that its save is not finished"
        last = unwritten_last(entry.name, files)
        if last is not None:
            return f"{last} is missing, which its trainer writes last"
    return None


def lost_ranks(step: Step) -> Iterator[str]:
    """Yield which files of ranks a step lacks, by the numbers in the names of those that it has.

    Numbers from 1 may count something else, if not the files of an optimizer; higher ones are ranks
    of LoRA. One process of each node may have saved a replica, but not of an optimizer alone.
    """
    ranks: dict[tuple[Location, str, str, str], dict[int, str]] = {}
    for path in dict.fromkeys((*step.entries, *step.parts)):
        name = parse_name(path.name, is_folder=False)
        head, *rest = re.split(r"rank[-_]?(\d+)", name.role)
        if len(rest) == 2:
            family = path.parent, re.sub(r"\d+", "#", name.family), head, rest[1]
            ranks.setdefault(family, {})[int(rest[0])] = path.name
    numbers_by_family = [sorted(names) for names in ranks.values()]
    heads_from_zero = {head for (_, _, head, _), names in ranks.items() if 0 in names}
    for (_, _, head, _), names in ranks.items():
        numbers = sorted(names)
        of_optimizer = role_of(head) == "optimizer"
        are_replicas = 0 in names and (not of_optimizer or numbers_by_family.count(numbers) > 1)
        gaps = numbers[-1] + 1 - len(numbers)
        if are_replicas and are_of_a_node(numbers) and gaps > len(numbers):
            continue
        missing = missing_files(names[numbers[0]], names, numbers[-1] + 1)
        are_ranks = 0 in names or (1 in names and of_optimizer and head not in heads_from_zero)
        if missing and are_ranks:
            yield missing


def _is_usual(file: str, holders: int, steps: int) -> bool:
    """Return whether half of the steps have a file; of training's own files fewer suffice.

    Without that, the first step may have files that no later one has, as somebody put them there.
    """
    return 2 * holders >= steps or ("/" not in file and is_of_training(file))


def _names_beside(step: Step, entry: Location, run: Run) -> set[str]:
    """Return the files in an entry's folder, and in that which all parts of the step share."""
    folders = run.relative(entry).rpartition("/")[0], "/".join(step.home.parts)
    return {name for folder in folders for name in run.names_in.get(folder, ())}


def _indexes_of(step: Step, run: Run) -> tuple[frozenset[str], frozenset[str]]:
    """Return the indexes of a step's shards, and those that lie beside none: some need none."""
    files = {file for entry in step.entries for file in run.files_in(entry)}
    indexes = frozenset(_SHARDS.sub("", f) + ".index.json" for f in files if _SHARDS.search(f))
    return indexes & files, indexes - files


class _FilesOfSteps(Struct):
    """The files that each of some whole steps has, those that any has, and how many these are."""

    common: Set[str] = frozenset()
    any: Set[str] = frozenset()
    indexes: Set[str] = frozenset()
    steps: int = 0

    def add(self, files: Set[str], indexes: Set[str]) -> None:
        """Count another whole step with its files, and the indexes of its shards."""
        self.common = self.common & files if self.steps else files
        self.any = self.any | files
        self.indexes = self.indexes | indexes
        self.steps += 1


class Completeness:
    """Compares the files and checkpoints of each step of a run with those of steps before it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lacks: dict[object, Mapping[object, frozenset[str]]] = {}

    def lacking(self, step: Step) -> list[str]:
        """Return the checkpoints that a step lacks, and every step before it has; else the files.

        Of files, only the whole steps before it count.
        """
        if step.series not in self._lacks:
            self._lacks[step.series] = self._compare(step)
        return sorted(self._lacks[step.series].get(step.path, ()))

    def _compare(self, step: Step) -> Mapping[object, frozenset[str]]:
        series = [other for other in self._run.by_series[step.series] if other.parts]
        files_in = {s.path: files_of(s, self._run) for s in series}
        finished_paths = {s.path for s in series if unfinished_reason(s, self._run) is None}
        holders = Counter(file for path in finished_paths for file in files_in[path])
        lacks: dict[object, frozenset[str]] = {}
        earlier = _FilesOfSteps()  # of the whole steps so far
        parts: frozenset[str] | None = None  # that all steps so far have
        for other in series:
            files = files_in[other.path]
            missing = frozenset(
                file
                for file in self._missing(other, files, earlier)
                if _is_usual(file, holders[file], len(finished_paths))
            )
            indexes, lost = _indexes_of(other, self._run)
            missing |= lost & earlier.indexes
            parts = other.names if parts is None else parts
            lacks[other.path] = parts - other.names if other.names < parts else missing
            parts &= other.names
            if not missing and other.path in finished_paths:
                earlier.add(files, indexes)
        return lacks

    def _missing(self, step: Step, files: Set[str], earlier: _FilesOfSteps) -> Iterator[str]:
        """Yield which of the files that all earlier whole steps have are missing in a step."""
        common = earlier.common
        if not common:
            return
        roles = {key: "model" if key == _DCP_FILES else role_of(key) for key in common}
        new_roles = {role_of(key) for key in files - earlier.any}
        models = {key for key, role in roles.items() if role == "model"}
        if None in new_roles and models and models.isdisjoint(files):
            return  # saved otherwise: all may be in files of which no name says what they have
        for key in common - files:
            least = _CORE if roles[key] is not None else 2
            if (
                earlier.steps >= least
                and roles[key] not in new_roles - {None}
                and not self._has_fewer_ranks(key, files, step)
            ):
                yield key

    def _has_fewer_ranks(self, key: str, files: Set[str], step: Step) -> bool:
        """Return whether a rank's file is missing since the step was saved by fewer ranks."""
        match = _OF_RANK.fullmatch(key)
        if match is None:
            return False
        matches = (_OF_RANK.fullmatch(file) for file in files)
        ranks = {int(m[2]) for m in matches if m is not None and m[1] == match[1]}
        return bool(ranks) and ranks == set(range(len(ranks))) == self._writers(step)

    def _writers(self, step: Step) -> set[int]:
        """Return the ranks that wrote the other files of a step, as far as their names say."""
        names = [n.rpartition("/")[2] for e in step.entries for n in self._run.files_in(e)]
        of_dcp = {int(m[1]) for m in map(_DCP.fullmatch, names) if m is not None and m[1]}
        worlds = {int(m[1] or m[2]) for m in map(_WORLD.search, names) if m is not None}
        return of_dcp or (set(range(worlds.pop())) if len(worlds) == 1 else set())
