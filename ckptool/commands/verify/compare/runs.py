"""Two runs that are compared: by the newest step that both have, and by the configs in both."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from ckptool.commands.detect import detect_checkpoint
from ckptool.commands.model.records import object_in
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.assessment import Assessor
from ckptool.commands.runs.order import open_run
from ckptool.commands.runs.search import is_run
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.verify.compare.values import difference, value_text
from ckptool.errors import CkptoolError, Damaged, Problem, Several, UsageError
from ckptool.storage.url import Location, within

_CONFIGS = (".json", ".yaml", ".yml")
_WORDS = frozenset(["arg", "args", "arguments", "cfg", "config", "hparams", "hyper_parameters"])


class StepPair(Struct, frozen=True):
    """The newest step that two runs have, in each of them."""

    runs: tuple[Run, Run]
    steps: tuple[Step, Step]

    @property
    def differing_configs(self) -> Iterator[Problem]:
        """Yield how the configs differ that lie in the folders of both runs, beside the steps."""
        one, other = self.runs
        names = (n for n in one.source.files if "/" not in n and n.endswith(_CONFIGS))
        for name in (name for name in names if name in other.source.files):
            try:
                configs = [object_in(run.source, name) for run in self.runs]
            except Damaged:
                continue
            if value_text(configs[0], name) != value_text(configs[1], name):
                yield Problem(f"{name}: {difference(*configs)}", "companion-differs", file=name)


def newest_of_both(one: Location, other: Location, options: ReadOptions) -> StepPair | None:
    """Return the newest step that two runs have, complete in both; None if one is no run.

    A step is the same in both if its name is, or the number in it. UsageError if there is none.
    """
    if not (_is_of_steps(one) and _is_of_steps(other)):
        return None
    runs = open_run(one, options), open_run(other, options)
    assessors = [Assessor(run, VerifyOptions(read=options, quick=True)) for run in runs]
    other_steps = {key: step for step in runs[1].steps for key in _keys(step, runs[1])}
    for step in reversed(runs[0].steps):
        twin = next((other_steps[key] for key in _keys(step, runs[0]) if key in other_steps), None)
        if twin is None or max(len(step.parts), len(twin.parts)) > 1:
            continue  # a step of several checkpoints cannot be opened as one
        pair = step, twin
        if all(a.assess(s).report.ok for a, s in zip(assessors, pair, strict=True)):
            return StepPair(runs, pair)
    raise UsageError(
        f"{one} and {other} have no complete step in common",
        hint=f"`ckptool {one}` lists the steps; `ckptool diff` compares any two of them",
    )


def is_argument(name: str | None) -> bool:
    """Return whether a value is one of a program's arguments, by a word in its name."""
    return name is not None and not _WORDS.isdisjoint(name.lower().split("."))


def _is_of_steps(place: Location) -> bool:
    """Return whether a folder is a run with several steps."""
    try:
        if place.is_dir() and not is_run(place):
            detect_checkpoint(place)
            return False
        return place.is_dir()
    except Several:
        return True
    except CkptoolError:
        return False


def _keys(step: Step, run: Run) -> list[object]:
    """Return what names a step in its run: its path, and the numbers in its name."""
    position = step.position
    numbers = (position.stage, position.epoch, position.step)
    return [within(step.path, run.path), *([numbers] if position else [])]
