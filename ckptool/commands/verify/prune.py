"""Which steps of a run to remove: never one that a rule keeps, a pointer names, or is unclear."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.detect import folder_at, require_known, unfinished_problem
from ckptool.commands.document import Report
from ckptool.commands.open import survey
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.transfer.overwrite import find_side
from ckptool.commands.verify.codes import require_codes
from ckptool.commands.verify.optimizer_files import has_optimizer
from ckptool.commands.verify.pointers import find_links, find_pointers
from ckptool.commands.verify.run_folder import verify_step
from ckptool.commands.verify.steps import Step, holds_steps, name_pattern, says_step, steps_of
from ckptool.commands.verify.strip import finish_strips, plan_strip
from ckptool.engine.write.removal import clear, leftovers, remove
from ckptool.errors import Changed, CkptoolError, Unsupported, UsageError
from ckptool.storage.url import Location, within

Notify = Callable[[str], None]
Fate = Literal["keep", "strip", "remove", "leave"]


class StepFate(Struct, frozen=True):
    """The fate of a step and the reason. ``leave`` means that no rule keeps it, but it stays.

    ``strip`` keeps a step without its optimizer's state. ``ok`` is the result of verify, None if
    not verified; ``nbytes`` is the size of its files, ``freed`` how many of these bytes go.
    """

    path: Location
    number: int | None
    fate: Fate
    reason: str
    nbytes: int
    freed: int = 0
    ok: bool | None = None


class PruneReport(Report, frozen=True):
    """The fate of each step of a run, newest first.

    ``leftovers`` are unfinished earlier removals; they are removed too. ``removed`` says whether
    the removal was done.
    """

    computed: ClassVar = ("ok", "good", "freed")

    path: Location
    steps: tuple[StepFate, ...]
    leftovers: tuple[Location, ...] = ()
    removed: bool = False

    schema: ClassVar = "prune"

    @property
    def good(self) -> int:
        """Kept steps without errors."""
        return sum(step.ok is True for step in self.kept)

    @property
    def kept(self) -> list[StepFate]:
        """Kept steps, with or without their optimizer's state."""
        return [step for step in self.steps if step.fate in ("keep", "strip")]

    @property
    def ok(self) -> bool:
        """Whether there is a good step, and no kept step is damaged."""
        return self.good > 0 and all(step.ok is not False for step in self.kept)

    @property
    def freed(self) -> int:
        """Bytes of the removed steps, and of the optimizer state removed from others."""
        return sum(step.freed for step in self.steps)

    def of_fate(self, fate: Fate) -> list[StepFate]:
        """Return the steps that have this fate."""
        return [step for step in self.steps if step.fate == fate]


def prune(run: Location, options: PruneOptions, notify: Notify = lambda text: None) -> PruneReport:
    """Decide which steps of a run are kept, verify these, and with ``yes`` remove the others.

    The steps of each folder in the run are counted separately, and so is each kind of step, by its
    name without numbers. ``notify`` is called with each long operation before it begins. Raises
    UsageError if no step would lose its optimizer, NotFound or Unrecognized if there is no
    checkpoint, Unsupported if the run is one checkpoint, TransferError if something cannot be
    removed, Changed if a kept step vanished meanwhile.
    """
    if options.drop_optimizer_of_older and options.keep_every is None:
        raise UsageError(
            "--drop-optimizer-of-older: requires --keep-every, which keeps older steps",
            hint="--keep-every 1 keeps all: the newest as they are, older ones without optimizer",
        )
    require_codes(options.verify.ignore)
    require_known(options.verify.read.from_format)
    steps = steps_of(run)
    if options.yes:
        for folder in {step.path.parent for step in steps}:
            finish_strips(folder)
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
    return _remove(report, options.verify, notify) if options.yes else report


class _Decision:
    """Decides on the steps of one kind in one folder, given oldest first."""

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
        self._resumes = False

    def fates(self) -> Iterator[StepFate]:
        """Yield the fate of each step, newest first."""
        for at in range(len(self._steps) - 1, -1, -1):
            yield self._fate(self._steps[at], self._steps[:at])

    def _fate(self, step: Step, older: Sequence[Step]) -> StepFate:
        nbytes = _nbytes_of(step.path)
        unclear = _unclear(step) or self._ambiguous(step)
        reason = None if unclear else self._reason_to_keep(step)
        if reason is None and (unclear or self._good >= self._options.keep_last):
            fate: Fate = "leave" if unclear else "remove"
            reason = unclear or "no rule keeps it"
            freed = nbytes if fate == "remove" else 0
            return StepFate(step.path, step.number, fate, reason, nbytes, freed)
        self._notify(f"verifying {step.path}")
        report = verify_step(step, older, self._options.verify)
        if report.ok:
            last = self._options.keep_last
            is_older = self._good >= last
            self._good += 1
            newest = "the newest good step" if last == 1 else f"one of the newest {last} good steps"
            kept = StepFate(step.path, step.number, "keep", reason or newest, nbytes, ok=True)
            is_last = self._is_last_to_resume(step)
            return self._stripped(step, kept, is_last=is_last) if is_older else kept
        damage = f"not good: {report.reasons[0]}"
        if reason is None:
            return StepFate(step.path, step.number, "leave", damage, nbytes, ok=False)
        return StepFate(step.path, step.number, "keep", f"{reason}; {damage}", nbytes, ok=False)

    def _is_last_to_resume(self, step: Step) -> bool:
        """Return whether a good step is the newest with an optimizer, if that matters."""
        if self._resumes or not self._options.drop_optimizer_of_older:
            return False
        read = self._options.verify.read
        self._resumes = any(has_optimizer(survey(part, read)) for part in step.parts)
        return self._resumes

    def _stripped(self, step: Step, kept: StepFate, *, is_last: bool) -> StepFate:
        """Return the fate of an older good step, which may lose its optimizer's state.

        The last one with an optimizer keeps it: training could resume from no other.
        """
        pointed = step.number is None or step.path in self._pointers
        if pointed or not self._options.drop_optimizer_of_older:
            return kept
        if is_last:
            return replace(kept, reason=f"{kept.reason}; no newer good step has an optimizer")
        verify = self._options.verify
        try:
            strips = plan_strip(step.parts, verify.read, verify.workers)
        except (CkptoolError, OSError) as error:
            return replace(kept, reason=f"{kept.reason}; its optimizer stays: {error}")
        if not strips:
            return replace(kept, reason=f"{kept.reason}; no optimizer found in it")
        reason = f"{kept.reason}, without its optimizer"
        return replace(kept, fate="strip", reason=reason, freed=sum(each.freed for each in strips))

    def _reason_to_keep(self, step: Step) -> str | None:
        """Return the rule that keeps a step, however old it is; None if there is none."""
        every = self._options.keep_every
        if step.number is None:
            return "has no step number"
        if step.path in self._pointers:
            return f"{self._pointers[step.path]} points to it"
        if every is not None and step.number % every == 0:
            return f"every {every:,} steps" if every > 1 else "every step"
        return None

    def _ambiguous(self, step: Step) -> str | None:
        """Return why a step may not be what its name says; None if it is clear."""
        if step.number is None:
            return None
        if self._numbers[step.number] > 1:
            return f"{self._numbers[step.number]} entries have the step number {step.number}"
        if not says_step(step):
            return "its name does not say that its number is a step"
        if isinstance(step.path, Path) and isinstance(self._run, Path):
            real, run = step.path.resolve(), self._run.resolve()
            if run in real.parents and real != run / within(step.path, self._run):
                return f"a symbolic link leads to {real}"
        return None


def _unclear(step: Step) -> str | None:
    """Return why a step must not be decided on; None if it is a checkpoint of its own."""
    path = step.path
    if isinstance(path, Path) and path.is_symlink():
        return f"a symbolic link to {os.readlink(path)}"
    if not step.parts:
        return "no known checkpoint in it"
    if path.is_dir() and unfinished_problem(folder_at(path)) is not None:
        return "unfinished output of ckptool"
    side, is_own = find_side(path)
    if side is not None and not is_own:
        return f"{side.name} beside it was not written by ckptool"
    if holds_steps(step):
        return "holds steps of its own"
    return None


def _remove(report: PruneReport, verify: VerifyOptions, notify: Notify) -> PruneReport:
    """Remove and strip steps as the report says, oldest first.

    Steps that something points to by now stay unchanged.
    """
    for leftover in report.leftovers:
        clear(leftover)
    steps = {step.path: step for step in steps_of(report.path)}
    fates = {step.path: step for step in report.steps}
    for fate in reversed([*report.of_fate("strip"), *report.of_fate("remove")]):
        _require_kept(report)
        pointers = find_pointers(report.path, list(steps.values()))
        if fate.path in pointers:
            reason = f"{pointers[fate.path]} points to it"
            fates[fate.path] = replace(fate, fate="keep", freed=0, reason=reason)
        elif fate.fate == "remove":
            notify(f"removing {fate.path}")
            side, is_own = find_side(fate.path)
            remove(fate.path, side if is_own else None)
        else:
            notify(f"dropping the optimizer of {fate.path}")
            for strip in plan_strip(steps[fate.path].parts, verify.read, verify.workers):
                strip.run()
    return replace(report, steps=tuple(fates.values()), removed=True)


def _require_kept(report: PruneReport) -> None:
    """Raise Changed if a kept step is no longer there."""
    for step in report.kept:
        if isinstance(step.path, Path) and not os.path.lexists(step.path):
            raise Changed(
                f"{step.path}: was to be kept and is gone; nothing more is removed",
                hint="run ckptool prune again: it decides by what is there now",
            )


def _nbytes_of(path: Location) -> int:
    """Return the bytes of all files of a step, including its side file."""
    if isinstance(path, Path) and not path.is_file():
        walked = ((head, name) for head, _, files in os.walk(path) for name in files)
        return sum(os.lstat(os.path.join(head, name)).st_size for head, name in walked)
    side, _ = find_side(path)
    return sum(map(_bytes_at, [path] if side is None else [path, side]))


def _bytes_at(place: Location) -> int:
    """Return the bytes of a local file, or of all files at a place in a store."""
    if isinstance(place, Path):
        return place.stat().st_size
    return sum(info.nbytes for info in place.listing.values())
