"""Verify the steps of a run while it is trained: each once it is finished."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from shlex import split
from shutil import which

from msgspec.structs import replace

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.assessment import Assessor, StepReport
from ckptool.commands.runs.contents import fingerprint_of
from ckptool.commands.runs.order import open_run
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.verify.codes import require_codes
from ckptool.errors import Unrecognized, UsageError
from ckptool.storage.place import is_gone, on_disk, require_there
from ckptool.storage.url import Location, afresh

_ON_DISK, _IN_STORE = 5.0, 30.0
"""Seconds between two looks at the run: in a store, each is a request for its list of files."""
_PLACE = "{}"

Fingerprint = Sequence[str | None]


def follow(
    run: Location, options: VerifyOptions, wait: Callable[[float], None] = time.sleep
) -> Iterator[StepReport]:
    """Yield the report of each step once it is finished, those that are there first; never end.

    Raises NotFound if there is no such folder; it may be empty as yet. ``wait`` is called with the
    seconds between two looks.
    """
    require_codes(options.ignore)
    require_there(run)
    follower = _Follower(run, options)
    while True:
        yield from follower.look()
        wait(_IN_STORE if on_disk(run) is None else _ON_DISK)


class _Follower:
    """The files of each step as of the last look, and as of its report."""

    def __init__(self, run: Location, options: VerifyOptions) -> None:
        self._path = run
        self._options = options
        self._seen: dict[Location, Fingerprint] = {}
        self._told: dict[Location, Fingerprint] = {}

    def look(self) -> Iterator[StepReport]:
        """Yield the reports of the steps that are finished since the last look, oldest first.

        A step is finished if none of its files changed since then, and if it is whole by its
        metadata, or a later step is: then nobody will finish it. A step that changes afterwards is
        reported again.
        """
        try:
            run = open_run(afresh(self._path), self._options.read)
        except Unrecognized:
            return
        prints = {step.path: fingerprint_of(step, run) for step in run.steps}
        candidates = [step for step in run.steps if prints[step.path] == self._seen.get(step.path)]
        self._seen = prints
        whole = self._whole(run, candidates)
        for step in candidates:
            path = step.path
            successors = {s.path for s in run.steps[run.index(step) + 1 :]}
            if prints[path] == self._told.get(path) or not whole & {path, *successors}:
                continue
            report = Assessor(run, self._options).assess(step).report
            if report.export or (not report.ok and is_gone(path)):
                continue  # it lies beside the steps, or was removed meanwhile
            self._told[path] = prints[path]
            yield report

    def _whole(self, run: Run, candidates: Sequence[Step]) -> set[Location]:
        """Return the steps that are whole by their metadata, names and sizes."""
        quick = Assessor(run, replace(self._options, quick=True))
        new = [step for step in candidates if self._seen[step.path] != self._told.get(step.path)]
        finished = {step.path for step in new if quick.assess(step).report.ok}
        return finished | self._told.keys()


def require_command(text: str) -> list[str]:
    """Return the words of a command with ``{}`` for a step's path; UsageError if it is none."""
    try:
        words = split(text)
    except ValueError as error:
        raise UsageError(f"--then {text!r}: {error}") from None
    if not any(_PLACE in word for word in words):
        raise UsageError(
            f"--then {text!r}: {_PLACE} is missing, which stands for the step's path",
            hint=f"--then '{text} {_PLACE}'; a shell is `sh -c '...' sh {_PLACE}`",
        )
    if which(words[0]) is None:
        raise UsageError(f"--then {text!r}: no such program: {words[0]}")
    return words


def run_command(words: Sequence[str], step: Location) -> int:
    """Run a command for a step, its output on stderr, and return its exit code.

    No shell reads the words. An interruption ends the command, too.
    """
    filled = [word.replace(_PLACE, str(step)) for word in words]
    with subprocess.Popen(filled, stdout=2) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise
