"""Remove old steps of a run: only as decided, and only while all that this rests on still holds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from shlex import quote
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.document import Report
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.contents import fingerprint_of
from ckptool.commands.runs.order import open_run
from ckptool.commands.runs.pointers.links import passes_link
from ckptool.commands.runs.pointers.pointers import find_pointers
from ckptool.commands.runs.prune.fates import Fate, Notify, StepFate, decide, unclear_reason
from ckptool.commands.runs.prune.strip import finish_strips, plan_strip
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.transfer.overwrite import find_side
from ckptool.commands.verify.codes import require_codes
from ckptool.engine.write.removal import clear, leftovers, remove
from ckptool.errors import (
    Changed,
    TransferError,
    Unsupported,
    UsageError,
)
from ckptool.storage.place import folder_at, on_disk
from ckptool.storage.url import Location, afresh


class Leftover(Struct, frozen=True):
    """What an earlier removal, which was interrupted, has left; ``problem`` says why it stays."""

    path: Location
    problem: str | None = None


class PruneReport(Report, frozen=True):
    """The fate of each step of a run, newest first.

    ``leftovers`` are unfinished earlier removals; they are removed too. ``stuck`` are those of them
    that cannot be. ``removed`` says whether the removal was done.
    """

    computed: ClassVar = ("ok", "good", "freed")

    path: Location
    steps: tuple[StepFate, ...]
    leftovers: tuple[Location, ...] = ()
    stuck: tuple[Leftover, ...] = ()
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

    @property
    def hint(self) -> str | None:
        """What removes steps that are left since they are not good; None without a good step."""
        bad = [step for step in self.of_fate("leave") if step.ok is False]
        paths = [path for step in bad for path in (step.path, *step.beside)]
        if not paths or not self.good:
            return None
        how = "remove it yourself"
        if all(map(on_disk, paths)):
            how = f"`rm -r {' '.join(quote(str(path)) for path in paths)}` does"
        why = "prune removes no step that is not good: its save may be under way, or it shows what"
        return f"{why} went wrong; {how}"

    def of_fate(self, fate: Fate) -> list[StepFate]:
        """Return the steps that have this fate."""
        return [step for step in self.steps if step.fate == fate]


def prune(run: Location, options: PruneOptions, notify: Notify = lambda text: None) -> PruneReport:
    """Decide which steps of a run are kept, verify these, and with ``yes`` remove the others.

    The steps of each folder in the run are counted separately, and so is each series, by the name
    without what it counts. ``notify`` is called with each long operation before it begins. Raises
    UsageError if no step would lose its optimizer, NotFound or Unrecognized if there is no
    checkpoint, Unsupported if the run is one checkpoint, TransferError if a pointer cannot be read
    or something cannot be removed, Changed if a kept step changed meanwhile.
    """
    if options.no_optimizer and options.keep_every is None:
        raise UsageError(
            "--no-optimizer: requires --keep-every, which keeps older steps",
            hint="--keep-every 1 keeps all: the newest as they are, older ones without optimizer",
        )
    require_codes(options.verify.ignore)
    opened = open_run(run, options.verify.read)
    if options.yes:
        for folder in _own_folders(opened):
            finish_strips(folder)
        opened = open_run(afresh(run), options.verify.read)
    if [step.path for step in opened.steps if step.parts] == [run]:
        raise Unsupported(
            f"{run} is one checkpoint, not a run with several steps",
            hint=f"name the folder with the run's steps: ckptool prune {run.parent} --keep-last 3",
        )
    stale = tuple(path for folder in _own_folders(opened) for path in leftovers(folder))
    steps = tuple(step for step in opened.steps if step.path not in stale)
    opened = Run(run, steps, opened.source)
    pointers = find_pointers(opened, options.verify.read)
    fates = decide(opened, pointers, options, notify)
    report = PruneReport(run, tuple(fates), stale)
    return _Removal(opened, report, options.verify, notify).run() if options.yes else report


def _own_folders(run: Run) -> Iterable[Location]:
    """Return the folders around the steps, but for those behind links: they are another's."""
    steps = (step for step in run.steps if passes_link(step, run) is None)
    return dict.fromkeys(entry.parent for step in steps for entry in step.entries)


def _gone_entries(step: Step) -> Iterator[Location]:
    """Yield the entries of a step on a disk that are not there any more."""
    for entry in step.entries:
        if (disk := on_disk(entry)) and not os.path.lexists(disk):
            yield entry


class _Removal(Struct):
    """Removes and strips steps as a report says, oldest first, one after the other."""

    opened: Run
    report: PruneReport
    verify: VerifyOptions
    notify: Notify
    stripped: set[Location] = field(default_factory=set)
    failed: list[TransferError] = field(default_factory=list)

    def run(self) -> PruneReport:
        """Remove and strip, and return what was done; TransferError at the end if a step stays."""
        stuck = self._clear()
        fates = {fate.path: fate for fate in self.report.steps}
        steps = {step.path: step for step in self.opened.steps}
        for fate in reversed([*self.report.of_fate("strip"), *self.report.of_fate("remove")]):
            step = steps[fate.path]
            if len([*_gone_entries(step)]) == len(step.entries):
                gone = replace(fate, fate="leave", freed=0, reason="it was removed meanwhile")
                fates[fate.path] = gone
            elif (reason := self._obstacle(step)) is not None:
                fates[fate.path] = replace(fate, fate="keep", freed=0, reason=reason)
            elif fate.fate == "strip":
                self._strip(step)
            else:
                self._remove(step)
        if self.failed:
            raise self.failed[0]
        stuck_paths = {leftover.path for leftover in stuck}
        rest = tuple(path for path in self.report.leftovers if path not in stuck_paths)
        outcomes = tuple(fates.values())
        return replace(self.report, steps=outcomes, leftovers=rest, stuck=stuck, removed=True)

    def _clear(self) -> tuple[Leftover, ...]:
        """Remove what earlier removals have left; what cannot go does not stop the rest."""
        stuck = []
        for leftover in self.report.leftovers:
            try:
                clear(leftover)
            except TransferError as error:
                stuck.append(Leftover(leftover, str(error)))
        return tuple(stuck)

    def _obstacle(self, step: Step) -> str | None:
        """Look at the run again: return why a step must stay by now.

        Raises Changed if a step that is to be kept is no longer as it was verified.
        """
        now = Run(self.opened.path, self.opened.steps, folder_at(afresh(self.opened.path)))
        paths = {fate.path for fate in self.report.kept}
        for kept_step in (s for s in self.opened.steps if s.path in paths):
            self._require_unchanged(kept_step, now)
        pointers = find_pointers(now)
        if step.path in pointers:
            return f"{pointers[step.path][0]} points to it"
        if fingerprint_of(step, now) != fingerprint_of(step, self.opened):
            return "it was changed meanwhile"
        return unclear_reason(now, step)

    def _require_unchanged(self, step: Step, now: Run) -> None:
        hint = "run ckptool prune again: it decides by what is there now"
        if gone := [*_gone_entries(step)]:
            message = f"{gone[0]}: was to be kept and is gone; nothing more is removed"
            raise Changed(message, hint=hint)
        if step.path not in self.stripped and fingerprint_of(step, now) != fingerprint_of(
            step, self.opened
        ):
            message = f"{step.path}: was to be kept and was changed; nothing more is removed"
            raise Changed(message, hint=hint)

    def _remove(self, step: Step) -> None:
        for entry in step.entries:
            self.notify(f"removing {entry}")
            side, is_own = find_side(entry)
            try:
                remove(entry, side if is_own else None)
            except TransferError as error:
                self.failed.append(error)
                return

    def _strip(self, step: Step) -> None:
        self.notify(f"dropping the optimizer of {step.path}")
        self.stripped.add(step.path)
        for strip in plan_strip(step.parts, self.verify.read, self.verify.workers):
            strip.run()
