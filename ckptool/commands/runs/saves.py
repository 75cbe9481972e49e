"""What of a run is one save: folders with a model and state of training, parts saved together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from ckptool.commands.open import survey_readable
from ckptool.commands.runs.names import EntryName, is_part_folder, parse_name
from ckptool.commands.runs.records import has_optimizer
from ckptool.commands.runs.steps import Step, is_folder
from ckptool.commands.runs.trainers import is_spared
from ckptool.core.state_category import weights
from ckptool.serialization.file_roles import is_of_training, role_of
from ckptool.storage.url import Location, within


def saves_by_contents(
    run: Location, checkpoints: Iterable[Location]
) -> Mapping[Location, Location]:
    """Return the checkpoints in folders that are one save, each with that folder.

    State of training lies in such a folder, or in its folders of parts, beside what is none.
    Nothing in it counts, is the best or the last, or lies in a folder deeper below. A number that
    is part of a word counts nothing there: ``wav2vec2``. Beside such a folder, one whose name has
    but another number is a save, too, whatever it lacks.
    """
    siblings: dict[Location, list[Location]] = {}
    for path in checkpoints:
        siblings.setdefault(path.parent, []).append(path)
    folders: dict[Location, list[Location]] = {}
    for folder, files in siblings.items():
        holder = folder if _is_one_save(files) else _holder(folder, run)
        folders.setdefault(holder, []).extend(files)
    parents = {parent for folder in folders for parent in folder.parents}
    leaves = [folder for folder in folders if folder not in parents]
    saves = {folder for folder in leaves if _is_one_save(folders[folder])}
    kinds = {_kind_of(folder) for folder in saves if _counts(folder)}
    saves |= {folder for folder in leaves if _kind_of(folder) in kinds}
    return {path: folder for folder in leaves if folder in saves for path in folders[folder]}


def _kind_of(folder: Location) -> tuple[Location, str]:
    return folder.parent, parse_name(folder.name, is_folder=True).kind


def _holder(folder: Location, run: Location) -> Location:
    """Return a folder of a run, or that around it if it is of a part: ``training_state``."""
    while folder != run and is_part_folder(folder.name) and not _counts(folder):
        folder = folder.parent
    return folder


def _counts(folder: Location) -> bool:
    name = parse_name(folder.name, is_folder=True)
    return bool(name.position) or name.bare is not None


def _is_one_save(files: Sequence[Location]) -> bool:
    names = [parse_name(path.name, is_folder=is_folder(path)) for path in files]
    if any(name.position or re.search(r"(?i)(?<![a-z])#", name.kind) for name in names):
        return False
    if any(is_spared(path.name) for path in files):
        return False
    return {_is_state(path, name) for path, name in zip(files, names, strict=True)} == {True, False}


def _is_state(path: Location, name: EntryName) -> bool:
    """Return whether a checkpoint is state of training, by its name or since it has no weights.

    ``cosine-scheduler`` and ``opt-125m`` may be folders of models, ``training_state`` is one of
    LeRobot's if it has the optimizer sharded. Beside an optimizer, a record may have tensors of
    what was seen, as SAELens's.
    """
    is_record = role_of(name.role) == "record" and name.family in ("", "/")
    if not is_record and (not is_of_training(name.role) or not name.family):
        return is_of_training(name.role)
    survey = survey_readable(path)
    if survey is None or survey.catalog is None or survey.problems:
        return name.family == "/"
    return (is_record and has_optimizer(survey)) or not weights(survey.catalog)


def separate_trainings(run: Location, entries: Sequence[Step]) -> Iterator[Step]:
    """Yield entries; parts that share no step are trainings, and each entry's family names its one.

    As ``teacher`` and ``student``, or ``lora1`` and ``lora2``.
    """
    steps_of: dict[object, dict[object, set[str]]] = {}
    for entry in entries:
        steps = steps_of.setdefault(entry.series, {})
        steps.setdefault((entry.position, entry.number), set()).add(_part_of(entry, run))
    families: dict[tuple[object, str], str] = {}
    for series, steps in steps_of.items():
        groups: list[set[str]] = []
        for parts in steps.values():
            union = parts.union(*(group for group in groups if group & parts))
            groups = [union, *(group for group in groups if not group & parts)]
        for parts in groups if len(groups) > 1 else ():
            families |= {(series, part): f"{min(parts)}: " for part in parts}
    for entry in entries:
        head = families.get((entry.series, _part_of(entry, run)), "")
        yield replace(entry, name=replace(entry.name, family=head + entry.name.family))


def _part_of(entry: Step, run: Location) -> str:
    """Return what an entry's name and its folders say of the part that it is, of any rank."""
    folders = within(entry.path, run).parts[len(entry.home.parts) : -1]
    words = (re.sub(r"(?i)rank[-_]?\d+|^\d+$", "", name) for name in (*folders, entry.name.role))
    return " ".join(filter(None, words))
