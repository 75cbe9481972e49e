"""The steps of a run's folder, by the names that trainers give them, and which have no errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ckptool.commands.detect import find_checkpoints, natural_key, require_known
from ckptool.commands.document import Report
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.codes import require_codes
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.verify import verify
from ckptool.errors import CkptoolError, NotFound, Unrecognised
from ckptool.storage.retry import NoAnswer
from ckptool.storage.url import Location, within


@dataclass(frozen=True, slots=True, repr=False)
class StepReport(Report):
    """What verify found of each checkpoint of a step; ``reasons`` say why it is not good, if so."""

    computed: ClassVar = ("ok",)

    path: Location
    number: int | None
    reports: tuple[VerifyReport, ...]
    reasons: tuple[str, ...]

    schema: ClassVar = "verify-step"

    @property
    def ok(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True, repr=False)
class RunReport(Report):
    """The steps that were verified, the newest first; ``total`` is how many the run has.

    It is true where there is a good one; where ``every`` step was verified, where all are good.
    """

    computed: ClassVar = ("ok",)

    path: Location
    steps: tuple[StepReport, ...]
    total: int
    every: bool = field(default=False, metadata={"key": None})

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

    A step that cannot be read fails, one that is removed meanwhile is skipped. Raises NotFound or
    Unrecognised where the folder has no checkpoint, UsageError for options that no step can be
    verified with, NoAnswer where a store gives none.
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
    """Return whether a folder of a disk is no longer there, as old steps of a run are removed."""
    if not isinstance(path, Path):
        return False
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _reason(report: VerifyReport, options: VerifyOptions) -> str:
    """Return the first thing that is wrong, and how much more is."""
    failures = report.fails(options.strict)
    if not failures:
        return report.summary
    more = f" (and {len(failures) - 1:,} more)" if len(failures) > 1 else ""
    message = failures[0].message.partition("\n")[0].removeprefix(f"{report.path}: ")
    return f"{failures[0].code}: {message}{more}"


def _after(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z]){words}[-_=]?(\d{{1,18}})(?!\d)", re.IGNORECASE)


_STEP = _after("(?:global[-_]?)?steps?")
_ITERATION = _after("iter(?:ation)?s?")
_EPOCH = _after("(?:epoch|ep)")
_NUMBERS = (_STEP, _ITERATION, _after("(?:checkpoint|ckpt)"), _EPOCH)
"""As in ``global_step100``, ``epoch=1-step=200.ckpt``, ``iter_0000100``, ``checkpoint-500``."""
_LAST_NUMBER = re.compile(r"(\d{1,18})(?!.*\d)")
_SHARD = re.compile(r"\d+-of-\d+")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run: where it lies, its number if its name has one, and its checkpoints.

    Most are one checkpoint; some trainers save several side by side (``actor``, ``critic``).
    """

    path: Location
    number: int | None
    parts: tuple[Location, ...]

    @property
    def names(self) -> frozenset[str]:
        """Return what its checkpoints are called inside it."""
        return frozenset(str(within(part, self.path)) for part in self.parts)


def steps_of(run: Location) -> list[Step]:
    """Return the steps of a run's folder, the oldest first; those without a number before all.

    What is hidden in it is none: it is being written, or removed.
    A folder that is named as the others are and holds no checkpoint is a step without parts. Where
    nothing below the folder is one, the folder itself may be. Raises NotFound or Unrecognised
    where there is no checkpoint at all.
    """
    itself, inner = find_checkpoints(run)
    if itself is not None:
        inner = [path for path in inner if _is_step(path, run)] or [itself]
    hidden = [path for path in inner if any(p.startswith(".") for p in within(path, run).parts)]
    inner = [path for path in inner if path not in hidden]
    if not inner:
        raise Unrecognised(
            f"{run}: no checkpoint in this folder",
            hint="list the known formats: ckptool formats",
        )
    steps = _group(run, inner)
    steps += _without_checkpoint(steps)
    steps.sort(key=lambda step: natural_key(str(step.path)))
    return sorted(steps, key=lambda step: -1 if step.number is None else step.number)


def _is_step(path: Location, run: Location) -> bool:
    """Return whether a checkpoint below a folder that is one itself is a step of its own.

    Files that are numbered from 0 without a gap are one a rank, not one a step.
    """
    parts = within(path, run).parts
    step = _step_in(parts)
    if step is None:
        return False
    if step[0] < len(parts) - 1 or _is_folder(path):
        return True
    alike = [
        name for name in _names_in(path.parent) if name_pattern(name) == name_pattern(path.name)
    ]
    numbers = {number for name in alike for _, number in filter(None, [_step_in((name,))])}
    return numbers != set(range(len(numbers)))


def _step_in(parts: tuple[str, ...]) -> tuple[int, int] | None:
    """Return which part of a relative path says the step, and the step."""
    for pattern in _NUMBERS:
        for at in range(len(parts) - 1, -1, -1):
            if match := pattern.search(parts[at]):
                return at, int(match[1])
    if not parts or _SHARD.search(parts[-1]):
        return None
    match = _LAST_NUMBER.search(Path(parts[-1]).stem)
    return (len(parts) - 1, int(match[1])) if match else None


def _group(run: Location, checkpoints: Iterable[Location]) -> list[Step]:
    """Return checkpoints that lie in one step's folder as one step."""
    groups: dict[Location, tuple[int | None, list[Location]]] = {}
    for checkpoint in checkpoints:
        parts = within(checkpoint, run).parts
        path, number = checkpoint, None
        if (step := _step_in(parts)) is not None:
            at, number = step
            path = run.joinpath(*parts[: at + 1])
        groups.setdefault(path, (number, []))[1].append(checkpoint)
    return [Step(path, number, tuple(inner)) for path, (number, inner) in groups.items()]


def _without_checkpoint(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield what lies beside steps and is called as they are, but holds no checkpoint."""
    known = {step.path for step in steps}
    patterns = {(path.parent, name_pattern(path.name)) for path in known if _step_in((path.name,))}
    for parent in dict.fromkeys(parent for parent, _ in patterns):
        for name in _names_in(parent):
            path = parent / name
            if path not in known and (parent, name_pattern(name)) in patterns:
                step = _step_in((name,))
                yield Step(path, step[1] if step else None, ())


def _is_folder(path: Location) -> bool:
    try:
        return path.is_dir()
    except NoAnswer:
        raise
    except OSError:
        return False


def _names_in(folder: Location) -> list[str]:
    """Return what lies directly in a folder; nothing where it is gone or cannot be listed."""
    try:
        return [path.name for path in folder.iterdir()]
    except NoAnswer:
        raise
    except (NotFound, OSError):
        return []


def name_pattern(name: str) -> str:
    """Return what is left of a name without its numbers: steps of one kind have one pattern."""
    return re.sub(r"\d+(?:\.\d+)?(?:e-?\d+)?", "#", name)


def says_step(step: Step) -> bool:
    """Return whether a step's name tells its number from that of a rank, a part or a version.

    ``checkpoint_3`` is a step as a folder, as a file it may well be what rank 3 saved.
    """
    words = _NUMBERS if _is_folder(step.path) else [_STEP, _ITERATION, _EPOCH]
    return any(pattern.search(step.path.name) for pattern in words)


def holds_steps(step: Step) -> bool:
    """Return whether a step's folder holds others, each in a folder or a file of its own."""
    names = (name for part in step.parts for name in within(part, step.path).parts)
    found = (pattern.search(name) for name in names for pattern in _NUMBERS)
    return any(match is not None and int(match[1]) != step.number for match in found)
