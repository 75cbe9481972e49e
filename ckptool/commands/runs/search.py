"""Find the steps of a run's folder: which checkpoints there are, and which of them are one step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath

from msgspec.structs import replace

from ckptool.commands.detect import detect_folder, find_checkpoints
from ckptool.commands.open import survey_readable
from ckptool.commands.runs.names import (
    Position,
    entry_in,
    is_part_folder,
    parse_name,
    part_folders,
)
from ckptool.commands.runs.records import has_optimizer
from ckptool.commands.runs.saves import saves_by_contents, separate_trainings
from ckptool.commands.runs.steps import Run, Step, fixed_in, is_folder, read_from, says_another
from ckptool.commands.runs.trainers import POINTERS, is_spared
from ckptool.core.state_category import weights
from ckptool.core.text import natural_key
from ckptool.errors import Unrecognized
from ckptool.formats import file_rule, latest_markers
from ckptool.formats.base import FileRole
from ckptool.formats.companions import TRAINER_FILES
from ckptool.serialization.file_kinds import nothing_found
from ckptool.serialization.file_roles import is_beside_model, is_of_training
from ckptool.storage.files import Files
from ckptool.storage.place import folder_at, folder_of, has_any, names_in, require_there
from ckptool.storage.url import Location, within

_NAMES_FILES = (FileRole.METADATA, FileRole.INDEX)
_SHARD = r"\d-of-\d"


def find_run(place: Location) -> Run:
    """Return a run with its steps by the order of their paths.

    Hidden entries are skipped: they are being written, or removed. A folder named like the others
    that holds no checkpoint is a step without parts. If there is no checkpoint below the folder,
    the folder itself may be one. Raises NotFound or Unrecognized if there is no checkpoint at all.
    """
    require_there(place)
    if not place.is_dir():
        raise Unrecognized(f"{place}: is a file, not a folder of checkpoints")
    source = folder_at(place)
    checkpoints = list(_checkpoints(place, place, source))
    if not checkpoints:
        raise nothing_found(place, folder_of(place), source, names_in(place))
    saves = saves_by_contents(place, checkpoints)
    entries = _entries(place, checkpoints, saves, fixed_in(source))
    entries += _without_checkpoint(entries)
    entries += _inside(place, entries, source)
    if place in saves.values():  # its model's file is what other commands take
        steps = [_join(sorted(entries, key=_by_contents))]
    else:
        steps = [*_join_steps(separate_trainings(place, entries))]
    return Run(place, tuple(sorted(steps, key=lambda step: natural_key(str(step.path)))), source)


def as_one_step(run: Run) -> Run:
    """Return a run of one step if its folder is named like one, and nothing in it counts steps.

    What lies in it, such as ``model`` and ``optim``, is parts of the step then, not steps. Numbers
    count only in names that differ in nothing else, and have a gap: those of shards have none.
    """
    place = run.path
    parts = [part for step in run.steps for part in step.parts]
    numbers: dict[str, set[int]] = {}
    for step in run.steps:
        numbers.setdefault(step.name.family, set()).add(step.name.bare or 0)
    counts = any(step.position for step in run.steps) or any(
        max(group) > len(group) > 1 for group in numbers.values()
    )
    if len(parts) < 2 or counts or not parse_name(place.name, is_folder=True).tells:
        return run
    steps = _entries(place.parent, parts, saves_by_contents(place.parent, parts), set())
    return Run(place, tuple(steps), run.source) if len(steps) == 1 else run


def is_run(place: Location) -> bool:
    """Return whether a folder has several steps, and a trainer's file that names the latest.

    ``open_checkpoint`` opens that one; without such a file it raises Several.
    """
    return has_any(place, latest_markers()) and len(find_run(place).steps) > 1


def _checkpoints(place: Location, run: Location, source: Files) -> Iterator[Location]:
    """Yield the checkpoints in a folder of a run, or the folder itself if it has none.

    A folder that is a checkpoint and counts nothing may hold a run of its own, of which it is what
    the trainer calls the latest.
    """
    is_checkpoint, inner = find_checkpoints(place, source)
    inner = [path for path in inner if not _is_hidden(path, run) and not _has_no_tensors(path)]
    if is_checkpoint:
        files = _files_of_whole(place, source)
        inner = [path for path in inner if path not in files]
        yield from _steps_in_whole(place, inner) or [place]
        return
    for path in inner:
        parts = within(path, run).parts
        counts = entry_in(parts, is_folder=is_folder(path))[1]
        if counts or not is_folder(path) or not _may_hold_run(path, run, source):
            yield path
        else:
            yield from _checkpoints(path, run, source.narrowed("/".join(within(path, place).parts)))


def _may_hold_run(path: Location, run: Location, source: Files) -> bool:
    """Return whether a folder of a checkpoint has entries that count steps.

    Files of ranks do that if they differ in their numbers.
    """
    head = "/".join(within(path, run).parts) + "/"
    files = [file[len(head) :].split("/") for file in source.files if file.startswith(head)]
    entry_names = (parse_name(n, is_folder=n != names[-1]) for names in files for n in names)
    if any(name.position and name.tells for name in entry_names):
        return True
    top_files = (parse_name(names[0], is_folder=False) for names in files if len(names) == 1)
    saves = {(name.family, name.position, name.bare) for name in top_files if name.has_rank}
    families = [family for family, position, bare in saves if position or bare is not None]
    return len(families) > len({*families})


def _has_no_tensors(path: Location) -> bool:
    """Return whether a file names a step, or has the arguments of transformers' Trainer."""
    return re.fullmatch(POINTERS, path.name) is not None or path.name in TRAINER_FILES


def _files_of_whole(place: Location, source: Files) -> set[Location]:
    """Return the files of a checkpoint that its metadata names, whatever their numbers count.

    Where only names make files one checkpoint, these may count steps as well.
    """
    row = detect_folder(source)
    rules = (file_rule(row, name) for name in source.files if "/" not in name)
    if row is None or all(rule is None or rule.role not in _NAMES_FILES for rule in rules):
        return set()
    survey = survey_readable(place)
    catalog = None if survey is None else survey.catalog
    return set() if catalog is None else {place / file for file in catalog.files}


def _is_hidden(path: Location, run: Location) -> bool:
    return any(part.startswith(".") for part in within(path, run).parts)


def _steps_in_whole(place: Location, inner: Sequence[Location]) -> list[Location]:
    """Return the steps in a folder that is a checkpoint itself, with the ranks' files of each.

    Beside those that count, the last or the best of ranks' files is a step of its own. Folders that
    are a number count nothing else where a file says which is the latest, as of SAT.
    """
    paths = (path for path in inner if path.parent != place or is_folder(path))
    folders = {within(path, place).parts[0] for path in paths}
    numbers = {name for name in folders if name.isdecimal()}
    if len(numbers) > 1 and has_any(place, latest_markers()):
        return [place / name for name in sorted(numbers)]
    files = [path for path in inner if not is_folder(path)]
    steps = [path for path in inner if _is_step(path, place, files)]
    positions = {_position_of(path) for path in steps} - {Position()}
    saves = [path for path in inner if path in steps or _position_of(path) in positions]
    return [p for p in inner if p in saves or (saves and (_is_spared_rank(p) or p.parent != place))]


def _is_spared_rank(path: Location) -> bool:
    return is_spared(path.name) and parse_name(path.name, is_folder=False).has_rank


def _position_of(path: Location) -> Position:
    return parse_name(path.name, is_folder=is_folder(path)).position


def _is_step(path: Location, run: Location, files: Sequence[Location]) -> bool:
    """Return whether a checkpoint inside a folder that is a checkpoint itself is a separate step.

    Files numbered from 0 without a gap are one per rank, not one per step, unless a word says what
    they count; ranks of one step have its number in common.
    """
    parts = within(path, run).parts
    at, position = entry_in(parts, is_folder=is_folder(path))
    if position and (at < len(parts) - 1 or is_folder(path)):
        return True
    name = parse_name(path.name, is_folder=False)
    if re.search(_SHARD, path.name) or (not position and name.bare is None):
        return False
    neighbours = files if name.has_rank else [file for file in files if file.parent == path.parent]
    names = [parse_name(file.name, is_folder=False) for file in neighbours]
    names = [other for other in names if other.family == name.family]
    if name.tells:
        return not name.has_rank or len({other.position for other in names}) > 1
    numbers = {other.position.number if other.position else other.bare for other in names}
    return numbers != set(range(len(numbers)))


def _entries(
    run: Location,
    checkpoints: Iterable[Location],
    saves: Mapping[Location, Location],
    fixed: Set[str],
) -> list[Step]:
    """Return the checkpoints in one entry of a run, or in one of the ``saves``, as one step.

    Names that are ``fixed`` count no step in another.
    """
    groups: dict[Location, list[Location]] = {}
    for checkpoint in checkpoints:
        parts = within(checkpoint, run).parts
        at, position = entry_in(parts, is_folder=is_folder(checkpoint), fixed=fixed)
        save = saves.get(checkpoint, run)
        entry = save if save != run else checkpoint
        path = run.joinpath(*parts[: at + 1]) if position else entry
        groups.setdefault(path, []).append(checkpoint)
    return [_entry(run, path, inner) for path, inner in groups.items()]


def _entry(run: Location, path: Location, inner: Sequence[Location]) -> Step:
    parts = within(path, run).parts
    name = parse_name(path.name, is_folder=is_folder(path) or not inner)
    _, position = entry_in(parts, is_folder=is_folder(path))
    within_step = part_folders(parts[:-1], has_rank=name.has_rank)
    home = PurePath(*parts[: len(parts) - 1 - len(within_step)])
    return Step(path, name, position, tuple(inner), home)


def _join_steps(entries: Iterable[Step]) -> Iterator[Step]:
    """Yield the entries that are one step as one: their names differ in nothing but the part."""
    groups: dict[tuple[object, ...], list[Step]] = {}
    for entry in entries:
        is_part = entry.name.has_rank or is_spared(entry.path.name)
        series = (entry.home, entry.name.family) if is_part else entry.series
        is_alone = entry.number is None and not is_part
        key = (entry.path,) if is_alone else (*series, entry.position, entry.number)
        groups.setdefault(key, []).append(entry)
    for group in groups.values():
        parts = {(entry.path.parent, entry.name.role) for entry in group}
        if len(parts) < len(group):
            yield from sorted(group, key=_by_model)
        else:
            yield _join(sorted(group, key=_by_model))


def _join(entries: Iterable[Step]) -> Step:
    """Return entries as one step, which is called as the first."""
    first, *rest = entries
    parts = tuple(part for entry in (first, *rest) for part in entry.parts)
    return replace(first, parts=parts, beside=tuple(entry.path for entry in rest))


def _by_contents(entry: Step) -> tuple[object, ...]:
    """Return a key that places weights first, and then what cannot be read and may have some."""
    surveys = [survey for part in entry.parts if (survey := survey_readable(part)) is not None]
    surveys = [survey for survey in surveys if not survey.problems]
    has_model = any(survey.catalog is not None and weights(survey.catalog) for survey in surveys)
    is_state = not has_model or is_of_training(entry.name.role)  # random states are tensors, too
    lacks_optimizer = is_state and not any(map(has_optimizer, surveys))
    return is_state, bool(surveys), lacks_optimizer, _by_model(entry)


def _by_model(entry: Step) -> tuple[object, ...]:
    return not _is_of_model(entry), not entry.name.role, natural_key(str(entry.path))


def _is_of_model(entry: Step) -> bool:
    folder = entry.path.parent.name
    is_part = is_part_folder(folder) and is_beside_model(folder)
    return bool(entry.parts) and not is_beside_model(entry.path.name) and not is_part


def _without_checkpoint(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield entries named like steps and beside them that hold no checkpoint."""
    paths = {step.path for step in steps}
    kinds = {(step.path.parent, step.name.kind): step for step in steps if step.position}
    for parent in dict.fromkeys(parent for parent, _ in kinds):
        for path in (parent / name for name in names_in(parent)):
            for as_folder in (True, False):
                name = parse_name(path.name, is_folder=as_folder)
                sibling = kinds.get((parent, name.kind))
                if sibling is not None and path not in paths and name.position:
                    paths.add(path)
                    position = replace(name.position, stage=sibling.position.stage)
                    yield Step(path, name, position, (), sibling.home)


def _inside(run: Location, steps: Iterable[Step], source: Files) -> Iterator[Step]:
    """Yield the steps in another step's folder that are not read as part of it."""
    candidates = (step for step in steps if step.parts == (step.path,) != (run,) and step.position)
    folders = {"/".join(within(step.path, run).parts): step for step in candidates}
    holders: dict[Location, Step] = {}
    fixed = fixed_in(source)
    for file in source.files if folders else ():
        names = file.split("/")
        for at in range(1, len(names)):
            step = folders.get("/".join(names[:at]))
            if step is not None and says_another(step, "/".join(names[at:]), fixed):
                holders[step.path] = step
    for step in holders.values():
        read = read_from(step, step.path)
        if read is not None and is_folder(step.path):
            files = [step.path / file for file in read]
            parts = {*files, *(folder for file in files for folder in file.parents)}
            _, paths = find_checkpoints(step.path, folder_at(step.path))
            inner = [path for path in paths if path not in parts]
            yield from _entries(run, inner, saves_by_contents(run, inner), fixed)
