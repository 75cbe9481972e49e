"""Which steps of a run are whole, and which of those is the newest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.recognise import require_known
from ckptool.commands.verify.codes import require_codes
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.steps import Step, steps_of
from ckptool.commands.verify.verify import VerifyOptions, verify
from ckptool.engine.patience import NoAnswer
from ckptool.engine.remote_path import Location, within
from ckptool.errors import CkptoolError, NotFound


@dataclass(frozen=True, slots=True)
class StepReport:
    """What verify found of one step: a report for each checkpoint in it.

    ``reasons`` say why it is not whole; there are none where it is.
    """

    step: Step
    reports: tuple[VerifyReport, ...]
    reasons: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True)
class RunReport:
    """The steps that were verified, the newest first; ``steps`` is how many there are."""

    path: Location
    steps: int
    verified: tuple[StepReport, ...]

    @property
    def latest_good(self) -> StepReport | None:
        """The newest step that is whole."""
        return next((one for one in self.verified if one.whole), None)


def verify_run(run: Location, options: VerifyOptions, *, every: bool) -> RunReport:
    """Verify the steps of a run from the newest to the first whole one, or ``every`` step.

    A step that cannot be read is not whole, one that is removed meanwhile is none. Raises NotFound
    or Unrecognised where the folder holds no checkpoint, UsageError for options that no step can
    be verified with, NoAnswer where a store gives none.
    """
    require_codes(options.ignore)
    require_known(options.read.format_name)
    steps = steps_of(run)
    verified = []
    for report in _reports(steps, options):
        if not report.whole and _is_gone(report.step.path):
            continue
        verified.append(report)
        if report.whole and not every:
            break
    return RunReport(run, len(steps), tuple(verified))


def _reports(steps: Sequence[Step], options: VerifyOptions) -> Iterator[StepReport]:
    for at in range(len(steps) - 1, -1, -1):
        yield _report(steps[at], steps[:at], options)


def _report(step: Step, older: Sequence[Step], options: VerifyOptions) -> StepReport:
    reports: list[VerifyReport] = []
    reasons = [*_missing_parts(step, older)]
    for part in step.parts:
        where = "" if part == step.path else f"{within(part, step.path)}: "
        try:
            report = verify(part, options)
        except NoAnswer:
            raise
        except (CkptoolError, OSError) as error:
            said = error.message if isinstance(error, CkptoolError) else str(error)
            reasons.append(where + said)
            continue
        reports.append(report)
        if not report.sound:
            reasons.append(where + _reason(report, options))
    return StepReport(step, tuple(reports), tuple(reasons))


def _missing_parts(step: Step, older: Sequence[Step]) -> Iterator[str]:
    """What a step lacks: any checkpoint, or some of those that every older one beside it has."""
    if not step.parts:
        yield _nothing_in(step.path)
        return
    beside = [one.names for one in older if one.path.parent == step.path.parent and one.parts]
    common = frozenset[str]().union(*beside).intersection(*beside) if beside else frozenset()
    if step.names < common:
        missing = ", ".join(sorted(common - step.names))
        yield f"{missing} is missing, which every earlier step has"


def _nothing_in(path: Location) -> str:
    try:
        is_empty = path.is_dir() and not any(path.iterdir())
    except (NotFound, OSError) as error:
        return f"cannot be listed: {error}"
    return "the folder is empty" if is_empty else "no checkpoint that ckptool knows is in it"


def _is_gone(path: Location) -> bool:
    """Whether a folder of a disk is no longer there, as old steps of a run are removed."""
    if not isinstance(path, Path):
        return False
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _reason(report: VerifyReport, options: VerifyOptions) -> str:
    """The first thing that is wrong, and how much more is."""
    found = report.fails(options.strict)
    if not found:
        return report.sentence
    more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
    message = found[0].message.partition("\n")[0].removeprefix(f"{report.path}: ")
    return f"{found[0].code}: {message}{more}"
