"""The steps of a run's folder: which entries of it are one, and which checkpoints they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from pathlib import PurePath

from msgspec import Struct

from ckptool.commands.open import open_checkpoint
from ckptool.commands.runs.names import (
    EntryName,
    Position,
    fixed_names,
    parse_name,
)
from ckptool.commands.runs.trainers import UNFINISHED
from ckptool.errors import CkptoolError, NoAnswer
from ckptool.storage.files import Files
from ckptool.storage.url import Location, within


class Step(Struct, frozen=True, dict=True):
    """One step of a run: the entry with its model, others ``beside`` it, and its checkpoints.

    Most are one entry with one checkpoint. Some trainers save several side by side (``actor``,
    ``critic``), others files beside each other (``model_step3.pt``, ``opt_step3.pt``, or one a
    rank). ``home`` is the folder in which the steps of its series are counted; ``placed`` says what
    its place among the other steps comes from.
    """

    path: Location
    name: EntryName
    position: Position
    parts: tuple[Location, ...]
    home: PurePath
    beside: tuple[Location, ...] = ()
    placed: str = ""

    @property
    def entries(self) -> tuple[Location, ...]:
        """Return every entry of the run that belongs to it."""
        return (self.path, *self.beside)

    @property
    def number(self) -> int | None:
        """Return the training step or epoch that its name counts, or the number that may be one."""
        return self.position.number if self.position else self.name.bare

    @cached_property
    def series(self) -> tuple[PurePath, str]:
        """Return what all steps share that are counted together.

        One without a number is alone, unless its trainer tells steps apart by their dates.
        """
        return self.home, self.name.family if "#" in self.name.kind else self.path.name

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names of its checkpoints inside it."""
        return frozenset(str(within(part, self.path)) for part in self.parts if part in self)

    def is_of_rank(self, part: Location) -> bool:
        """Return whether a checkpoint of it is one of several ranks' files, to be read by itself.

        The others in its folder may be of other steps. A link ``latest-rank0.pt`` to the folder of
        a sharded step of Composer's is none.
        """
        is_named = part in self.entries and parse_name(part.name, is_folder=False).has_rank
        return is_named and not is_folder(part)

    def __contains__(self, place: Location) -> bool:
        return place == self.path or self.path in place.parents


class Run(Struct, frozen=True, dict=True):
    """A run's folder, its steps, oldest first, and the files below it."""

    path: Location
    steps: tuple[Step, ...]
    source: Files

    @cached_property
    def _folders(self) -> Mapping[str, Files]:
        return self.source.subfolders()

    @cached_property
    def by_series(self) -> Mapping[object, Sequence[Step]]:
        """Return the steps of each series, oldest first."""
        series: dict[object, list[Step]] = {}
        for step in self.steps:
            series.setdefault(step.series, []).append(step)
        return series

    @cached_property
    def _indices(self) -> Mapping[Location, int]:
        return {step.path: index for index, step in enumerate(self.steps)}

    def index(self, step: Step) -> int:
        """Return the place of a step among all, the oldest being 0."""
        return self._indices[step.path]

    @cached_property
    def names_in(self) -> Mapping[str, frozenset[str]]:
        """Return the names of the files directly in each folder, relative to the run."""
        names: dict[str, set[str]] = {}
        for file in self.source.files:
            folder, _, name = file.rpartition("/")
            names.setdefault(folder, set()).add(name)
        return {folder: frozenset(files) for folder, files in names.items()}

    @cached_property
    def fixed(self) -> Set[str]:
        """Return the names that count the same in each of its steps."""
        return fixed_in(self.source)

    def files_in(self, entry: Location) -> Mapping[str, int]:
        """Return the files of an entry, relative to it, and their sizes; of a file, as ``""``."""
        name = self.relative(entry)
        if name == "":
            return self.source.files
        if name in self.source.files:
            return {"": self.source.files[name]}
        inner = self._folders.get(name)
        return {} if inner is None else inner.files

    def relative(self, place: Location) -> str:
        """Return the path of a place relative to the run, empty for the run itself."""
        return _relative(place, self.path)

    def folder(self, entry: Location) -> Files:
        """Return an entry that is a folder as a source of its own."""
        name = self.relative(entry)
        return self._folders[name] if name else self.source

    def unlisted_in(self, entry: Location) -> Iterator[str]:
        """Yield what could not be listed in an entry, and why."""
        head = self.relative(entry)
        for name, why in self.source.unlisted.items():
            if name == head or name.startswith(f"{head}/"):
                yield f"{name}: {why}"


@lru_cache(1 << 14)
def _relative(place: Location, folder: Location) -> str:
    return "/".join(within(place, folder).parts)


def is_folder(path: Location) -> bool:
    """Return whether a path is a folder; one that cannot be looked at is none. Raises NoAnswer."""
    try:
        return path.is_dir()
    except NoAnswer:
        raise
    except OSError:
        return False


def is_unfinished_name(step: Step) -> bool:
    """Return whether a step's name says that it is being written."""
    return any(re.fullmatch(UNFINISHED, entry.name) is not None for entry in step.entries)


def others_inside(step: Step, run: Run) -> str | None:
    """Return what in a step's folder belongs to another step, at any depth; None if nothing does.

    Files that a step as a whole is read from belong to it, whatever their name, such as
    ``global_step1`` of DeepSpeed. Names that are ``fixed`` may be another's, too: what is removed
    must be the step's for sure.
    """
    for part in step.parts:
        inner = [] if part in step.entries else within(part, _entry_of(step, part)).parts
        positions = (parse_name(name, is_folder=False).position for name in inner)
        if any(position and position.number != step.number for position in positions):
            return "/".join(inner)
    for entry in step.entries:
        names = [name for name in run.files_in(entry) if says_another(step, name)]
        read = read_from(step, entry) if names else set()
        other = next((name for name in names if read is None or name not in read), None)
        if other is not None:
            return other
    return None


def _entry_of(step: Step, part: Location) -> Location:
    return next((entry for entry in step.entries if entry in part.parents), step.path)


def read_from(step: Step, entry: Location) -> set[str] | None:
    """Return the files below an entry that its checkpoints are read from; None if unknown."""
    files: set[str] = set()
    try:
        for part in (part for part in step.parts if part == entry or entry in part.parents):
            opened = open_checkpoint(part)
            head = opened.path if opened.path.is_dir() else opened.path.parent
            files |= {"/".join(within(head / f, entry).parts) for f in opened.catalog.files}
    except (CkptoolError, ValueError):
        return None
    return files


def fixed_in(source: Files) -> Set[str]:
    """Return the names of folders that count the same in each of several steps."""
    return fixed_names(f.split("/") for f in {file.rpartition("/")[0] for file in source.files})


def says_another(step: Step, file: str, fixed: Set[str] = frozenset()) -> bool:
    """Return whether a folder on a file's path, or the file, has the number of another step.

    Names that are ``fixed`` have none.
    """
    *folders, file_name = file.split("/")
    names = [parse_name(folder, is_folder=True) for folder in folders if folder not in fixed]
    names.append(parse_name(file_name, is_folder=False))
    positions = (name.position for name in names if name.tells)
    return any(position and position.number != step.number for position in positions)
