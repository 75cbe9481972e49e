"""Which steps of a run to remove: none that a rule keeps, that is pointed to, or is unclear."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ckptool.commands.detect import folder_at, require_known, unfinished_problem
from ckptool.commands.document import Report
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.verify.codes import require_codes
from ckptool.commands.verify.run_folder import (
    Step,
    holds_steps,
    name_pattern,
    says_step,
    steps_of,
    verify_step,
)
from ckptool.engine.write.removal import clear, leftovers, remove
from ckptool.errors import Changed, CkptoolError, NotFound, Unsupported
from ckptool.storage.commit_note import side_name
from ckptool.storage.url import Location, within

_LONGEST_POINTER = 4096
_TRAINER_STATE = "trainer_state.json"
_LARGEST_STATE = 64 << 20

Notify = Callable[[str], None]
Fate = Literal["keep", "remove", "leave"]


@dataclass(frozen=True, slots=True)
class StepFate:
    """What becomes of a step and why. ``leave`` is what no rule keeps and nobody removes.

    ``ok`` says what verify found, None where it was not asked; ``nbytes`` is the size of its files.
    """

    path: Location
    number: int | None
    fate: Fate
    reason: str
    nbytes: int
    ok: bool | None = None


@dataclass(frozen=True, slots=True, repr=False)
class PruneReport(Report):
    """What becomes of each step of a run, the newest first.

    ``leftovers`` are what earlier removals did not finish; they go too. ``removed`` says whether
    that was done.
    """

    computed: ClassVar = ("ok", "good", "freed")

    path: Location
    steps: tuple[StepFate, ...]
    leftovers: tuple[Location, ...] = ()
    removed: bool = False

    schema: ClassVar = "prune"

    @property
    def good(self) -> int:
        """Steps that are kept and that verify found no error in."""
        return sum(step.fate == "keep" and step.ok is True for step in self.steps)

    @property
    def ok(self) -> bool:
        """Whether there is a good step, and no step that is kept is damaged."""
        return self.good > 0 and all(s.ok is not False for s in self.steps if s.fate == "keep")

    @property
    def freed(self) -> int:
        """Bytes of the steps that go."""
        return sum(step.nbytes for step in self.steps if step.fate == "remove")

    def of_fate(self, fate: Fate) -> list[StepFate]:
        """Return the steps that have this fate."""
        return [step for step in self.steps if step.fate == fate]


def prune(run: Location, options: PruneOptions, notify: Notify = lambda text: None) -> PruneReport:
    """Decide which steps of a run are kept, verify these, and with ``yes`` remove the others.

    The steps of each folder in the run are counted by themselves, and of these each kind, by their
    names without numbers. ``notify`` is called with what is done next, as it takes long. Raises
    NotFound or Unrecognised where there is no checkpoint, Unsupported where the run is one
    checkpoint, TransferError where something cannot be removed, Changed where a step that is kept
    is gone meanwhile.
    """
    require_codes(options.verify.ignore)
    require_known(options.verify.read.from_format)
    steps = steps_of(run)
    if [step.path for step in steps if step.parts] == [run]:
        raise Unsupported(f"{run} is one checkpoint, not a run with several steps")
    folders = dict.fromkeys(step.path.parent for step in steps)
    left = tuple(path for folder in folders for path in leftovers(folder))
    steps = [step for step in steps if step.path not in left]
    pointers = find_links(run, steps) | find_pointers(run, steps)
    kinds: dict[tuple[Location, str], list[Step]] = {}
    for step in steps:
        kinds.setdefault((step.path.parent, name_pattern(step.path.name)), []).append(step)
    fates: list[StepFate] = []
    for alike in kinds.values():
        fates += _Decision(run, alike, pointers, options, notify).fates()
    report = PruneReport(run, tuple(fates), left)
    return _remove(report, notify) if options.yes else report


class _Decision:
    """Decides on the steps of one kind beside one another, given the oldest first."""

    def __init__(
        self,
        run: Location,
        steps: Sequence[Step],
        pointers: Mapping[Location, str],
        options: PruneOptions,
        notify: Notify,
    ) -> None:
        self._run = run
        self._steps = steps
        self._pointers = pointers
        self._options = options
        self._notify = notify
        self._numbers = Counter(step.number for step in steps if step.number is not None)
        self._good = 0

    def fates(self) -> Iterator[StepFate]:
        """Yield what becomes of each step, the newest first."""
        for at in range(len(self._steps) - 1, -1, -1):
            yield self._fate(self._steps[at], self._steps[:at])

    def _fate(self, step: Step, older: Sequence[Step]) -> StepFate:
        nbytes = _nbytes_of(step.path)
        unclear = _unclear(step) or self._ambiguous(step)
        reason = None if unclear else self._reason_to_keep(step)
        if reason is None and (unclear or self._good >= self._options.keep_last):
            fate: Fate = "leave" if unclear else "remove"
            reason = unclear or "no rule keeps it"
            return StepFate(step.path, step.number, fate, reason, nbytes)
        self._notify(f"verifying {step.path}")
        report = verify_step(step, older, self._options.verify)
        if report.ok:
            self._good += 1
            last = self._options.keep_last
            newest = "the newest good step" if last == 1 else f"one of the newest {last} good steps"
            reason = reason or newest
            return StepFate(step.path, step.number, "keep", reason, nbytes, ok=True)
        damage = f"not good: {report.reasons[0]}"
        if reason is None:
            return StepFate(step.path, step.number, "leave", damage, nbytes, ok=False)
        return StepFate(step.path, step.number, "keep", f"{reason}; {damage}", nbytes, ok=False)

    def _reason_to_keep(self, step: Step) -> str | None:
        """Return what keeps a step however old it is; None where nothing does."""
        every = self._options.keep_every
        if step.number is None:
            return "has no step number"
        if step.path in self._pointers:
            return f"{self._pointers[step.path]} points to it"
        if every is not None and step.number % every == 0:
            return f"every {every:,} steps"
        return None

    def _ambiguous(self, step: Step) -> str | None:
        """Return why a step may be another thing than its name says; None where it is clear."""
        if step.number is None:
            return None
        if self._numbers[step.number] > 1:
            return f"{self._numbers[step.number]} beside one another have the number {step.number}"
        if not says_step(step):
            return "its name does not say that its number is a step"
        if isinstance(step.path, Path) and isinstance(self._run, Path):
            real, run = step.path.resolve(), self._run.resolve()
            if run in real.parents and real != run / within(step.path, self._run):
                return f"a symbolic link leads to {real}"
        return None


def _unclear(step: Step) -> str | None:
    """Return why nobody should decide on a step; None where it is a checkpoint of its own."""
    path = step.path
    if isinstance(path, Path) and path.is_symlink():
        return f"a symbolic link to {os.readlink(path)}"
    if not step.parts:
        return "no known checkpoint in it"
    if path.is_dir() and unfinished_problem(folder_at(path)) is not None:
        return "unfinished output of ckptool"
    if holds_steps(step):
        return "holds steps of its own"
    return None


def _remove(report: PruneReport, notify: Notify) -> PruneReport:
    """Remove what the report says, the oldest first; what is pointed to meanwhile stays."""
    for leftover in report.leftovers:
        clear(leftover)
    steps = steps_of(report.path)
    fates = {step.path: step for step in report.steps}
    for fate in reversed(report.of_fate("remove")):
        _require_kept(report)
        pointers = find_pointers(report.path, steps)
        if fate.path in pointers:
            reason = f"{pointers[fate.path]} points to it"
            fates[fate.path] = replace(fate, fate="keep", reason=reason)
        else:
            notify(f"removing {fate.path}")
            remove(fate.path)
    return replace(report, steps=tuple(fates.values()), removed=True)


def _require_kept(report: PruneReport) -> None:
    """Raise Changed where a step that is kept is no longer there."""
    for step in report.of_fate("keep"):
        if isinstance(step.path, Path) and not os.path.lexists(step.path):
            raise Changed(
                f"{step.path}: was to be kept and is gone; nothing more is removed",
                hint="run ckptool prune again: it decides by what is there now",
            )


def find_pointers(run: Location, steps: Sequence[Step]) -> dict[Location, str]:
    """Return the steps that something beside them or in the run names, each with what does.

    That is a link, a small file such as ``latest`` (DeepSpeed, Megatron-LM), or the newest
    ``trainer_state.json`` of transformers' Trainer, which names the best checkpoint.
    """
    pointers: dict[Location, str] = {}
    for folder in dict.fromkeys([run, *(step.path.parent for step in steps)]):
        beside = [step for step in steps if step.path.parent == folder]
        for path in _small_files(folder):
            named = steps if folder == run else beside
            _add_named(_read_text(path), path.name, named, pointers)
        if isinstance(folder, Path):
            for link in (path for path in folder.iterdir() if path.is_symlink()):
                _add_target(link, str(within(link, run)), steps, pointers)
        for step in reversed(beside):
            best = _best_checkpoint(step)
            if best is not None:
                _add_named(best, f"{step.path.name}/{_TRAINER_STATE}", beside, pointers)
                break
    return pointers


def find_links(run: Location, steps: Sequence[Step]) -> dict[Location, str]:
    """Return the steps that a link elsewhere in the run leads into, each with such a link."""
    pointers: dict[Location, str] = {}
    for link in _links_below(run, steps) if isinstance(run, Path) else ():
        others = [step for step in steps if step.path not in link.parents]
        _add_target(link, str(within(link, run)), others, pointers)
    return pointers


def _links_below(run: Path, steps: Sequence[Step]) -> Iterator[Path]:
    """Yield the links in a run and in its steps, also where a link leads to a step's folder."""
    paths = [s.path for s in steps if isinstance(s.path, Path) and not s.path.is_symlink()]
    for root in (run, *paths):
        for head, folders, files in os.walk(root):
            below = [Path(head, name) for name in (*folders, *files)]
            yield from (path for path in below if path.is_symlink())
            folders[:] = [name for name in folders if Path(head, name) not in paths]


def _small_files(folder: Location) -> Iterator[Location]:
    """Yield the files directly in a folder that are small enough to be a name."""
    with suppress(NotFound):
        if isinstance(folder, Path):
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.stat().st_size <= _LONGEST_POINTER:
                    yield path
        else:
            for name, info in folder.listing.items():
                if name and "/" not in name and info.nbytes <= _LONGEST_POINTER:
                    yield folder / name


def _read_text(path: Location) -> str:
    with suppress(CkptoolError, OSError):
        return path.read_bytes().decode("utf-8", "replace").strip()
    return ""


def _add_named(
    text: str, source: str, steps: Sequence[Step], pointers: dict[Location, str]
) -> None:
    """Add the steps that a text is the name or the number of, or a path to or into."""
    names = {part for part in text.split("/") if part}
    number = int(text) if text.isdecimal() and len(text) < 20 else None
    for step in steps:
        if step.path.name.strip() in names or (number is not None and step.number == number):
            pointers.setdefault(step.path, source)


def _add_target(
    link: Path, source: str, steps: Sequence[Step], pointers: dict[Location, str]
) -> None:
    with suppress(OSError, RuntimeError):
        target = link.resolve()
        for step in steps:
            if isinstance(step.path, Path) and not step.path.is_symlink():
                real = step.path.resolve()
                if real == target or real in target.parents:
                    pointers.setdefault(step.path, source)


def _best_checkpoint(step: Step) -> str | None:
    """Return the checkpoint that the state of transformers' Trainer in a step calls the best."""
    file = step.path / _TRAINER_STATE
    with suppress(CkptoolError, OSError, ValueError):
        if isinstance(file, Path) and file.stat().st_size > _LARGEST_STATE:
            return None
        state: Any = json.loads(file.read_bytes())
        best = state.get("best_model_checkpoint") if isinstance(state, Mapping) else None
        return best if isinstance(best, str) else None
    return None


def _nbytes_of(path: Location) -> int:
    """Return the bytes of all files of a step, its side file among them."""
    if not isinstance(path, Path):
        return sum(info.nbytes for info in path.listing.values())
    if path.is_file():
        side = side_name(path.name)
        files = [path] if side is None else [path, path.with_name(side)]
        return sum(file.stat().st_size for file in files if file.is_file())
    walked = ((head, name) for head, _, files in os.walk(path) for name in files)
    return sum(os.lstat(os.path.join(head, name)).st_size for head, name in walked)
