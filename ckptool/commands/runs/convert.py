"""Convert the steps of a run, each under its own name: one after the other, as ``convert`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.document import Report
from ckptool.commands.options.question import Question
from ckptool.commands.options.steps import StepChoice
from ckptool.commands.options.target import ConvertOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.assessment import Assessor
from ckptool.commands.runs.order import open_run
from ckptool.commands.runs.search import as_one_step
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.transfer.transfer import Transfer
from ckptool.commands.verify.codes import require_codes
from ckptool.commands.verify.compare.against import against
from ckptool.core.text import list_some
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.errors import SourceError, Unsupported, UsageError
from ckptool.formats import FORMATS, single_file_suffixes
from ckptool.storage.place import is_gone
from ckptool.storage.url import Location, within

Notify = Callable[[str], None]
Noted = Callable[[Sequence[str]], None]
_JUDGED_QUICKLY = (
    "a dry run judges steps by their metadata; before one is converted, its data is verified, too"
)
State = Literal["written", "equal", "planned", "not good", "left out", "failed"]


class ConvertedStep(Struct, frozen=True):
    """What became of a step, or of one of its several checkpoints; ``nbytes`` of the target.

    It is ``written``, or ``equal`` to what is at its target already; ``not good``, ``left out``
    since it is no step, or ``failed``, each with the ``reason``. A dry run has it ``planned``.
    """

    path: Location
    number: int | None
    state: State
    target: Location | None = None
    nbytes: int | None = None
    reason: str = ""


class ConvertRunReport(Report, frozen=True):
    """The steps of a run that were asked for, newest first; true if all good ones are converted.

    ``notes`` are those on each conversion, without repetitions.
    """

    computed: ClassVar = ("ok",)

    path: Location
    target: Location
    steps: tuple[ConvertedStep, ...]
    notes: tuple[str, ...] = ()
    total: int = field(default=0, name="totals.steps")

    schema: ClassVar = "convert-run"

    @property
    def ok(self) -> bool:
        return not self.of_state("failed") and any(step.target is not None for step in self.steps)

    def of_state(self, state: State) -> list[ConvertedStep]:
        """Return the steps in this state."""
        return [step for step in self.steps if step.state == state]


def convert_run(
    run: Location,
    target: Location,
    choice: StepChoice,
    options: ConvertOptions,
    notify: Notify = lambda text: None,
    progress: Progress = UNWATCHED,
    noted: Noted = lambda notes: None,
) -> ConvertRunReport:
    """Convert the good steps of a run that are asked for into a folder, the newest first.

    A step is good if ``verify`` calls it so; a dry run judges by metadata alone. What is at its
    target already is compared with it, and replaced only with ``overwrite``. With ``resume`` an
    interrupted step is continued. ``noted`` is called with the notes on a step that no earlier one
    had, before it is written. Raises UsageError if that is what ends the first step.
    """
    choice.require_one_way(options)
    require_codes(choice.ignore)
    _require_folder(target)
    opened = as_one_step(open_run(run, options.read))
    _require_several(opened)
    conversion = _Conversion(opened, target, options, notify, progress, noted)
    verify = choice.judging(options)
    assessor = Assessor(opened, verify)
    if verify.quick:
        conversion.note([_JUDGED_QUICKLY])
    results: list[ConvertedStep] = []
    good = 0
    for step in reversed(opened.steps):
        if good == choice.last:
            break
        if not choice.wants(step.number) or is_gone(step.path):
            continue
        if not verify.quick:
            notify(f"verifying {step.path}")
        report = assessor.assess(step).report
        if not report.goes_on:
            state: State = "left out" if report.ok else "not good"
            why = "; ".join(report.reasons) or "an export beside the steps"
            results.append(ConvertedStep(step.path, step.number, state, reason=why))
            continue
        parts = [*conversion.convert(step)]
        good += all(part.state != "failed" for part in parts)
        results += parts
    if choice.every is not None and not results:
        numbers = [str(step.number) for step in opened.steps if step.number is not None]
        listed = list_some(numbers, 4) if numbers else "not numbered"
        raise UsageError(f"--every {choice.every}: no step of {run} is a multiple of it: {listed}")
    return ConvertRunReport(run, target, tuple(results), conversion.notes, len(opened.steps))


def _require_folder(target: Location) -> None:
    """Raise UsageError for the name of a file: each step gets a name of its own in a folder."""
    if target.suffix in single_file_suffixes():
        raise UsageError(
            f"{target}: the name of a {target.suffix} file, but several steps go into a folder",
            hint="choose another name for DST; --to says what is written for each step",
        )


def _require_several(run: Run) -> None:
    if any(step.path == run.path for step in run.steps):
        raise Unsupported(
            f"{run.path} is one checkpoint, not a run with several steps",
            hint="leave out --all-steps, --last and --every",
        )


class _Conversion(Struct):
    """Converts steps of one run with the same options; ``notes`` are those on all so far."""

    run: Run
    target: Location
    options: ConvertOptions
    notify: Notify
    progress: Progress
    noted: Noted
    notes: tuple[str, ...] = ()
    has_planned: bool = False

    def note(self, notes: Sequence[str]) -> None:
        """Tell the notes that no earlier checkpoint had."""
        new = [note for note in notes if note not in self.notes]
        self.notes += tuple(dict.fromkeys(new))
        self.noted(new)

    def convert(self, step: Step) -> Iterator[ConvertedStep]:
        """Convert each checkpoint of a step: most have one, which is called as the step."""
        for part in step.parts:
            path = step.path if len(step.parts) == 1 else part
            target = self.target / self._name(within(path, self.run.path).as_posix())
            result = partial(ConvertedStep, part, step.number, target=target)
            try:
                yield self._convert(part, target, result)
                self.has_planned = True
            except (SourceError, Unsupported, UsageError) as error:
                if isinstance(error, UsageError) and not self.has_planned:
                    error.add_hint(f"so it is in {part}")
                    raise
                hint = f" ({error.hint})" if error.hint else ""
                yield result("failed", reason=f"{error}{hint}")

    def _name(self, name: str) -> str:
        """Return the name of a target: the step's, with the suffix of the format's files if any."""
        to, suffixes = self.options.to, single_file_suffixes()
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), "")
        if to is None or to not in FORMATS:
            return name
        row = FORMATS[to]
        is_file = row.detection.suffixes and row.detection.folder is None
        return name.removesuffix(suffix) + (row.detection.suffixes[0] if is_file else "")

    def _convert(
        self, source: Location, target: Location, result: Callable[..., ConvertedStep]
    ) -> ConvertedStep:
        """Convert one checkpoint, and return its ``result``, to which only the state is added."""
        how = self.options.transfer
        transfer = prepare(source, target, self.options)
        nbytes = transfer.report.write_bytes
        self.note(transfer.report.notes)
        if how.dry_run:
            reason = "there already: it would be compared" if target.exists() else ""
            return result("planned", nbytes=nbytes, reason=reason)
        difference: str | None = ""
        if target.exists():
            self.notify(f"comparing {source} with {target}")
            difference = self._difference(source, target)
        if difference is None:
            return result("equal", nbytes=nbytes)
        self._write(transfer, difference)
        return result("written", nbytes=nbytes)

    def _write(self, transfer: Transfer[ConvertReport], difference: str) -> None:
        """Write a target, with ``resume`` or ``overwrite`` from where a run ended, if one did."""
        how, target = transfer.options, transfer.target
        self.notify(f"writing {target}")
        for resume in (True, False) if how.resume or how.overwrite else (False,):
            if difference and not (resume or how.overwrite):
                raise Unsupported(f"{target}: there already, and {difference}", hint="--overwrite")
            options = replace(how, resume=resume, overwrite=how.overwrite and not resume)
            try:
                report = replace(transfer, options=options).run(self.progress)
            except Unsupported:
                if not resume:
                    raise
            else:
                self.note(report.notes)
                return

    def _difference(self, source: Location, target: Location) -> str | None:
        """Return how a target differs from what would be written there; None if it does not."""
        options = self.options
        verify = VerifyOptions(read=options.read, workers=options.transfer.run.workers)
        question = Question(check=verify, rewrite=options.rewrite)
        try:
            comparison = against(source, target, question, self.progress)
        except SourceError as error:
            return str(error)
        return None if comparison.ok else comparison.verify.summary
