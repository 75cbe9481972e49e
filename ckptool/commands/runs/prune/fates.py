"""The fate of each step of a run: never one that a rule keeps, a pointer names, or is unclear."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.runs.assessment import Assessor, StepReport
from ckptool.commands.runs.contents import model_parts
from ckptool.commands.runs.exports import is_export
from ckptool.commands.runs.names import Position
from ckptool.commands.runs.order import trainings_of
from ckptool.commands.runs.pointers.links import passes_link
from ckptool.commands.runs.prune.strip import plan_strip
from ckptool.commands.runs.records import recorded_position
from ckptool.commands.runs.steps import Run, Step, is_unfinished_name, others_inside
from ckptool.commands.runs.trainers import is_spared
from ckptool.commands.transfer.overwrite import find_side
from ckptool.core.text import list_some
from ckptool.engine.write.removal import mounted_in
from ckptool.errors import CkptoolError, NoAnswer
from ckptool.storage.commit_note import unfinished_problem
from ckptool.storage.url import Location

_NUMBER = re.compile("[0-9]+")
_LAST = re.compile(r"(?i)(?<![a-z])(?:last|latest)(?![a-z])")
Notify = Callable[[str], None]
Fate = Literal["keep", "strip", "remove", "leave"]
_UNCALLED = "its name does not say that its number is a step"


class StepFate(Struct, frozen=True):
    """The fate of a step and the reason. ``leave`` means that no rule keeps it, but it stays.

    ``strip`` keeps a step without its optimizer's state. ``ok`` is whether it is good, None if not
    assessed; ``nbytes`` is the size of its files, ``freed`` how many of these bytes go. ``beside``
    are the other entries of the run that belong to the step, and share its fate.
    """

    path: Location
    number: int | None
    fate: Fate
    reason: str
    nbytes: int
    freed: int = 0
    ok: bool | None = None
    beside: tuple[Location, ...] = ()


def decide(
    run: Run, pointers: Mapping[Location, Sequence[str]], options: PruneOptions, notify: Notify
) -> list[StepFate]:
    """Decide on every step of a run; those of each series newest first.

    ``notify`` is called with each long operation before it begins.
    """
    assessor = Assessor(run, options.verify)
    fates: list[StepFate] = []
    for steps in run.by_series.values():
        positions = Counter(step.position for step in steps if step.position)
        after = ""
        for training in trainings_of(run, steps):
            how = positions, pointers, options, assessor, notify
            fates += _Decision(run, training, after, *how).fates()
            after = f" of those written after {training[-1].path.name}"
    steps_by_path = {step.path: step for step in run.steps}
    fates = [_hold_back(fate, fates, steps_by_path, run.path, assessor) for fate in fates]
    return [*_naming_own_files(fates, steps_by_path, run)]


def _naming_own_files(
    fates: Sequence[StepFate], steps: Mapping[Location, Step], run: Run
) -> Iterator[StepFate]:
    """Yield the fates; a removal names the step's files that none of those that stay has.

    They may be the user's: results, notes, an export. Numbers in names make no difference, as each
    rank and each layer has its own.
    """
    files = {
        fate.path: {_NUMBER.sub("0", file): file for entry in steps[fate.path].entries
                    for file in run.files_in(entry)}
        for fate in fates
    }  # fmt: skip
    staying = {kind for fate in fates if fate.fate != "remove" for kind in files[fate.path]}
    for fate in fates:
        own_files = sorted(file for kind, file in files[fate.path].items() if kind not in staying)
        if fate.fate == "remove" and own_files:
            reason = f"{fate.reason}; no step that stays has its {list_some(own_files, 3)}"
            fate = replace(fate, reason=reason)
        yield fate


def _hold_back(
    fate: StepFate,
    fates: Sequence[StepFate],
    steps: Mapping[Location, Step],
    run: Location,
    assessor: Assessor,
) -> StepFate:
    """Return a step's fate; it stays if it lies in another, or one of its number needs it.

    As an optimizer that stays needs its model, or the other way around, whatever they are called.
    """
    step = steps[fate.path]
    holder = next((path for path in step.path.parents if path in steps and path != run), None)
    if holder is not None and fate.fate in ("remove", "strip"):
        reason = f"lies in {holder.name}, which is a checkpoint itself"
        return replace(fate, fate="leave", reason=reason, freed=0)
    if fate.fate != "remove":
        return fate
    for other_fate in fates:
        other = steps[other_fate.path]
        is_same_step = other.position == step.position and not is_export(other, run)
        if other_fate.fate == "remove" or not other.parts or not is_same_step:
            continue
        has, lacks = assessor.contents_of(step), assessor.contents_of(other)
        if (has.model and not lacks.model) or (has.optimizer and not lacks.optimizer):
            reason = f"{other.path.name}, which stays, is of the same step"
            return replace(fate, fate="leave", reason=reason, freed=0)
    return fate


class _Decision(Struct, dict=True):
    """Decides on the ``steps`` of one training, given oldest first.

    It may have begun ``after`` another training of its series, in which ``positions`` count the
    steps at each. ``good`` counts the good steps so far, ``parts`` are their files, and ``resumes``
    says that training may go on from one.
    """

    run: Run
    steps: Sequence[Step]
    after: str
    positions: Mapping[Position, int]
    pointers: Mapping[Location, Sequence[str]]
    options: PruneOptions
    assessor: Assessor
    notify: Notify
    good: int = 0
    parts: frozenset[str] = frozenset()
    resumes: bool = False

    @cached_property
    def are_counted(self) -> bool:
        """Whether what the steps record shows that the numbers in their names count them.

        The difference of the two is the same in each step; folds may record any. Raises NoAnswer.
        """
        options, steps = self.options.verify.read, [step for step in self.steps if step.parts]
        records = [(step.number, recorded_position(step, options)) for step in steps]
        differences = [
            {_difference(number, getattr(record, word)) for number, record in records}
            for word in ("epoch", "step")
        ]
        return len(records) > 1 and any(len(d) == 1 and None not in d for d in differences)

    def fates(self) -> Iterator[StepFate]:
        """Yield the fate of each step, newest first."""
        for step in reversed(self.steps):
            yield self._fate(step)

    def _fate(self, step: Step) -> StepFate:
        fate = StepFate(
            step.path, step.number, "leave", "", size_of(self.run, step), beside=step.beside
        )
        unclear = unclear_reason(self.run, step) or self._ambiguity(step) or self._delta_cause(step)
        reason = None if unclear else self._reason_to_keep(step)
        is_enough = self.good >= self.options.keep_last
        if unclear is not None:
            return replace(fate, reason=unclear)
        need = self._need_for(step)
        if reason is None and is_enough and need is None:
            return _remove(fate)
        self.notify(f"verifying {step.path}")
        # however quick, what other steps go for is read: NaN shows nowhere but in its data
        reads = not self.good or need is not None
        report = self.assessor.assess(step, reads=reads).report
        return self._by_report(step, fate, reason, report)

    def _by_report(
        self, step: Step, fate: StepFate, reason: str | None, report: StepReport
    ) -> StepFate:
        """Return the fate of a step that a rule keeps, or that may be one of the newest good."""
        is_older = self.good >= self.options.keep_last
        if not report.ok:
            damage = f"not good: {report.reasons[0]}"
            if reason is None:
                return replace(fate, reason=damage, ok=False)
            return replace(fate, fate="keep", reason=f"{reason}; {damage}", ok=False)
        need = self._need_for(step)
        if reason is None and is_older:
            if need is None:
                return _remove(fate)
            reason = need
        self.good += 1
        self.parts |= model_parts(step, self.run)
        self.resumes = self.resumes or self.assessor.contents_of(step).may_resume
        last = self.options.keep_last
        newest = "the newest good step" if last == 1 else f"one of the newest {last} good steps"
        fate = replace(fate, fate="keep", reason=reason or newest + self.after, ok=True)
        return self._strip(step, fate, need) if is_older else fate

    def _delta_cause(self, step: Step) -> str | None:
        """Return why a weight delta stays, unless training goes on from a newer step."""
        is_delta = not self.resumes and self.assessor.contents_of(step).delta
        return "a weight delta, which those after it are applied to" if is_delta else None

    def _need_for(self, step: Step) -> str | None:
        """Return what a step has, or may have, that no newer good step has; None if nothing."""
        contents = None if self.resumes else self.assessor.contents_of(step)
        if contents is not None and contents.may_resume:
            return "no newer good step has an optimizer"
        parts = model_parts(step, self.run) - self.parts
        return f"no newer good step has {list_some(sorted(parts), 1)}" if parts else None

    def _strip(self, step: Step, fate: StepFate, need: str | None) -> StepFate:
        """Return the fate of an older good step, which may lose its optimizer's state.

        One that there is ``need`` for keeps it: training could resume from no other.
        """
        is_named = not step.position or step.path in self.pointers
        if is_named or not self.options.no_optimizer:
            return fate
        if need is not None:
            is_known = need in fate.reason
            return fate if is_known else replace(fate, reason=f"{fate.reason}; {need}")
        if step.beside:
            return replace(fate, reason=f"{fate.reason}; its optimizer stays: it has several files")
        verify = self.options.verify
        try:
            strips = plan_strip(step.parts, verify.read, verify.workers)
        except (CkptoolError, OSError) as error:
            return replace(fate, reason=f"{fate.reason}; its optimizer stays: {error}")
        if not strips:
            return replace(fate, reason=f"{fate.reason}; no optimizer found in it")
        reason = f"{fate.reason}, without its optimizer"
        return replace(fate, fate="strip", reason=reason, freed=sum(s.freed for s in strips))

    def _reason_to_keep(self, step: Step) -> str | None:
        """Return the rule that keeps a step, however old it is; None if there is none."""
        every = self.options.keep_every
        if step.path in self.pointers:
            source = self.pointers[step.path][0]
            is_own = source == self.run.relative(step.path)
            return "it names itself as the best" if is_own else f"{source} points to it"
        if not step.position:
            return "has no step number" if step.number is None else _UNCALLED
        number = step.number
        if every is not None and number is not None and number % every == 0:
            return f"every {every:,} steps" if every > 1 else "every step"
        if is_spared(step.path.name) and not self._is_one_of_many(step):
            return "its name says that it is no step among many"
        return None

    def _is_one_of_many(self, step: Step) -> bool:
        """Return whether more than one step of its kind is called the last: each was, once.

        As rl_games' ``last_Ant_ep_200_rew_35.1.pth``.
        """
        alike = [other for other in self.steps if other.name.kind == step.name.kind]
        return len(alike) > 1 and not is_spared(_LAST.sub("", step.path.name))

    def _ambiguity(self, step: Step) -> str | None:
        """Return why a step may not be what its name says; None if it is clear."""
        if step.position and self.positions[step.position] > 1:
            return f"{self.positions[step.position]} entries have the step number {step.number}"
        has_digits = any(map(str.isdigit, step.path.name))
        if step.name.tells or not has_digits or step.path in self.pointers or self.are_counted:
            return None
        return _UNCALLED


def _difference(number: int | None, recorded: int | None) -> int | None:
    return None if number is None or recorded is None else recorded - number


def _remove(fate: StepFate) -> StepFate:
    return replace(fate, fate="remove", reason="no rule keeps it", freed=fate.nbytes)


def unclear_reason(run: Run, step: Step) -> str | None:
    """Return why nothing of a step may be removed; None if all of it is a step and nothing else.

    Raises NoAnswer.
    """
    try:
        return _unclear_step(run, step)
    except NoAnswer:
        raise
    except (CkptoolError, OSError) as error:  # as a trainer removes it meanwhile
        return f"cannot be looked through: {error}"


def _unclear_step(run: Run, step: Step) -> str | None:
    link = passes_link(step, run)
    if link is not None:
        return link
    if not step.parts:
        return "no known checkpoint in it"
    if is_unfinished_name(step):
        return "its name says that its save was never finished"
    if is_export(step, run.path):
        return "lies beside the steps of the run"
    for entry in step.entries:
        why = _unclear_entry(run, entry)
        if why is not None:
            return why
    inside = others_inside(step, run)
    return None if inside is None else f"holds steps of its own, as {inside}"


def _unclear_entry(run: Run, entry: Location) -> str | None:
    hidden = next(run.unlisted_in(entry), None)
    if hidden is not None:
        return f"cannot be looked through: {hidden}"
    mount = mounted_in(entry)
    if mount is not None:
        return f"another file system is mounted at {mount}"
    inner = {name for name in run.files_in(entry) if name}
    if inner and unfinished_problem(run.folder(entry)) is not None:
        return "unfinished output of ckptool"
    side, is_own = find_side(entry)
    if side is not None and not is_own:
        return f"{side.name} beside it was not written by ckptool"
    return None


def size_of(run: Run, step: Step) -> int:
    """Return the bytes of all files of a step, including its side files."""
    total = 0
    for entry in step.entries:
        total += sum(run.files_in(entry).values())
        side, _ = find_side(entry)
        total += 0 if side is None else run.files_in(side).get("", 0)
    return total
