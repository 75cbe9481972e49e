"""Which steps of a run's folder have no errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import field

from ckptool.commands.detect import require_known
from ckptool.commands.document import Report
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.codes import require_codes
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.steps import Step, steps_of
from ckptool.commands.verify.verify import verify
from ckptool.errors import CkptoolError, NotFound
from ckptool.storage.retry import NoAnswer
from ckptool.storage.url import Location, within


class StepReport(Report, frozen=True):
    """The findings for each checkpoint of a step; ``reasons`` say why it is not good."""

    computed: ClassVar = ("ok",)

    path: Location
    number: int | None
    reports: tuple[VerifyReport, ...]
    reasons: tuple[str, ...]

    schema: ClassVar = "verify-step"

    @property
    def ok(self) -> bool:
        return not self.reasons


class RunReport(Report, frozen=True):
    """The verified steps, newest first; ``total`` is how many the run has.

    True if one is good; if ``every`` step was verified, true if all are.
    """

    computed: ClassVar = ("ok",)

    path: Location
    steps: tuple[StepReport, ...]
    total: int
    every: bool = field(default=False, name="_every")

    schema: ClassVar = "verify-run"

    @property
    def ok(self) -> bool:
        if self.every:
            return all(step.ok for step in self.steps)
        return self.latest_good is not None

    def more(self) -> Mapping[str, object]:
        """Return the path of the newest good step."""
        return {"latest_good": None if self.latest_good is None else self.latest_good.path}

    def _short(self) -> dict[str, Any]:
        newest = {name: str(path) for name, path in self.more().items() if path is not None}
        return Report._short(self) | newest

    @property
    def latest_good(self) -> StepReport | None:
        """Return the newest step without errors."""
        return next((step for step in self.steps if step.ok), None)


def verify_run(run: Location, options: VerifyOptions, *, every: bool) -> RunReport:
    """Verify the steps of a run from the newest to the first without errors, or every one.

    An unreadable step fails; one that is removed meanwhile is skipped. Raises NotFound or
    Unrecognized if the folder has no checkpoint, UsageError for options that suit no step, NoAnswer
    if a store does not answer.
    """
    require_codes(options.ignore)
    require_known(options.read.from_format)
    steps = steps_of(run)
    verified = []
    for at in range(len(steps) - 1, -1, -1):
        report = verify_step(steps[at], steps[:at], options)
        if not report.ok and _is_gone(report.path):
            continue
        verified.append(report)
        if report.ok and not every:
            break
    return RunReport(run, tuple(verified), len(steps), every)


def verify_step(
    step: Step,
    older: Sequence[Step],
    options: VerifyOptions,
    check: Callable[[Location, VerifyOptions], VerifyReport] | None = None,
) -> StepReport:
    """Verify each checkpoint of a step, by ``check`` if given; ``older`` are those before it.

    Raises NoAnswer.
    """
    reports: list[VerifyReport] = []
    reasons = [*_missing_parts(step, older)]
    for part in step.parts:
        where = "" if part == step.path else f"{within(part, step.path)}: "
        try:
            report = (check or verify)(part, options)
        except NoAnswer:
            raise
        except (CkptoolError, OSError) as error:
            reasons.append(f"{where}{error}")
            continue
        reports.append(report)
        if not report.ok:
            reasons.append(where + _reason(report, options))
    return StepReport(step.path, step.number, tuple(reports), tuple(reasons))


def _missing_parts(step: Step, older: Sequence[Step]) -> Iterator[str]:
    """Yield what a step lacks: any checkpoint, or some of those that every older one has."""
    if not step.parts:
        yield _nothing_in(step.path)
        return
    beside = [each.names for each in older if each.path.parent == step.path.parent and each.parts]
    common = frozenset[str]().union(*beside).intersection(*beside) if beside else frozenset()
    if step.names < common:
        missing = ", ".join(sorted(common - step.names))
        yield f"{missing} is missing; every earlier step has it"


def _nothing_in(path: Location) -> str:
    try:
        is_empty = path.is_dir() and not any(path.iterdir())
    except NoAnswer:
        raise
    except (NotFound, OSError) as error:
        return f"cannot be listed: {error}"
    return "the folder is empty" if is_empty else "no known checkpoint in it"


def _is_gone(path: Location) -> bool:
    """Return whether a folder on a disk no longer exists, as old steps of a run are removed."""
    if not isinstance(path, Path):
        return False
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _reason(report: VerifyReport, options: VerifyOptions) -> str:
    """Return the first problem, and how many more there are."""
    failures = report.fails(options.strict)
    if not failures:
        return report.summary
    more = f" (and {len(failures) - 1:,} more)" if len(failures) > 1 else ""
    message = failures[0].message.partition("\n")[0].removeprefix(f"{report.path}: ")
    return f"{failures[0].code}: {message}{more}"
