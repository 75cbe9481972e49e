"""The order of a run's steps: by what their names count, a pointer, what they record, or time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ckptool.commands.detect import require_known
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.runs.contents import AT_ONCE, saved
from ckptool.commands.runs.names import Position
from ckptool.commands.runs.pointers.pointers import find_pointers, latest_source
from ckptool.commands.runs.records import recorded_position
from ckptool.commands.runs.search import find_run
from ckptool.commands.runs.steps import Run, Step
from ckptool.errors import TransferError
from ckptool.storage.url import Location

_NAMED = "by the {} in its name"
_RECORDED = "by the {} that it records"
_BY_TIME = "by the time at which it was saved: no name says what it counts"
_MIXED = "by the time at which it was saved: some names count epochs, others steps"
_BY_NUMBER = "by the number in its name, which agrees with the time at which it was saved"

_BEST = re.compile(r"(?i)(?<![a-z])best")

Key = tuple[float, ...]


def open_run(place: Location, options: ReadOptions = AS_DETECTED) -> Run:
    """Return a run with its steps, oldest first. Raises as ``find_run`` does, and NoAnswer.

    Steps that neither a name, a pointer nor a record places come before the others. Raises
    UsageError for an unknown format.
    """
    require_known(options.from_format)
    run = find_run(place)
    named = [step for step in run.steps if step.position]
    others = [step for step in run.steps if not step.position]
    counted = _counted_in_names([step.position for step in named])
    if named and not counted:
        placed = _by_time(run, named, _MIXED)
    else:
        placed = [_counting(step, 1, step.position, counted, _NAMED) for step in named]
        placed.sort(key=_place)
    if others:
        placed = _with_others(run, placed, others, counted, options)
    return Run(place, tuple(step for _, _, step in placed), run.source)


Placed = tuple[Key, int, Step]


def _place(placed: Placed) -> tuple[object, ...]:
    key, rank, step = placed
    match = re.search(r"-v(\d+)(?=\.|$)", step.path.name)
    return key, rank, int(match[1]) if match else 0


def _counting(
    step: Step, rank: int, position: Position, counted: Sequence[str], words: str
) -> Placed:
    """Return a step placed by the numbers of a position, and its stage.

    What counts no step is the end of its epoch.
    """
    numbers = position.numbers(counted)
    key = position.stage or 0, *(math.inf if number is None else number for number in numbers)
    said = (word for word, number in zip(counted, numbers, strict=True) if number is not None)
    return key, rank, replace(step, placed=words.format(" and ".join(said)))


def _counted_in_names(positions: Sequence[Position]) -> tuple[str, ...]:
    """Return what names count: the steps of epochs, too, if some save within one.

    As timm's ``recovery-3-200`` lies before its ``checkpoint-3``.
    """
    counted = _counted(positions)
    has_steps = any(position.step is not None for position in positions)
    return ("epoch", "step") if counted == ("epoch",) and has_steps else counted


def _counted(positions: Iterable[Position]) -> tuple[str, ...]:
    """Return what all positions count, epochs before steps; nothing if they differ in that."""
    found = list(positions)
    has_epochs = bool(found) and all(each.epoch is not None for each in found)
    has_steps = bool(found) and all(each.step is not None for each in found)
    return ("epoch",) * has_epochs + ("step",) * has_steps


def _by_time(run: Run, steps: Iterable[Step], words: str) -> list[Placed]:
    words *= len(run.steps) > 1
    timed: list[Placed] = [
        ((saved(step, run) or 0.0,), 0, replace(step, placed=words)) for step in steps
    ]
    timed.sort(key=_place)
    for end in range(1, len(timed)):
        at = end
        while at and _may_be_copy(timed[at], timed[at - 1]):
            timed[at - 1 : at + 1] = timed[at], timed[at - 1]
            at -= 1
    return timed


def _may_be_copy(later: Placed, earlier: Placed) -> bool:
    """Return whether the best was saved together with another, which may well be newer."""
    says_best, other = (_BEST.search(step.path.name) for _, _, step in (later, earlier))
    return bool(says_best) and other is None and later[0][0] - earlier[0][0] <= AT_ONCE


def _with_others(
    run: Run,
    named: list[Placed],
    others: list[Step],
    counted: tuple[str, ...],
    options: ReadOptions,
) -> list[Placed]:
    """Place steps without a named number among the others, or before them."""
    records = {step.path: recorded_position(step, options) for step in others if step.parts}
    if not named:
        counted = _counted(records.values()) if len(records) == len(others) else ()
    common = _counted(step.position for _, _, step in named) or counted
    newest = {placed[2].home: placed for placed in sorted(named, key=_place)}
    rest: list[Step] = []
    for step in others:
        position = records.get(step.path, Position())
        past = _past(position, newest.get(step.home), options)
        if past and _is_later(run, step, newest[step.home][2]):
            key, _, _ = newest[step.home]
            words = _RECORDED.format(past)
            named.append(((*key, position.number or 0), 1, replace(step, placed=words)))
        elif counted and None not in position.numbers(common):
            named.append(_counting(step, 0, position, counted, _RECORDED))
        else:
            rest.append(step)
    return _with_latest_last(run, [*_unrecorded(run, rest), *sorted(named, key=_place)])


def _past(position: Position, newest: Placed | None, options: ReadOptions) -> str:
    """Return what is more in a record than in that of the newest named step; nothing if nothing is.

    Names may count from another number than records, or what these count by another word, as
    ``checkpoint_30`` does of an epoch; the last of a trainer may be some steps into an epoch.
    """
    if not position or newest is None:
        return ""
    other = recorded_position(newest[2], options)
    both = {"step": (position.step, other.step), "epoch": (position.epoch, other.epoch)}
    for word, (mine, theirs) in both.items():
        if mine is not None and theirs is not None:
            return word if mine > theirs else ""
    return ""


def _is_later(run: Run, step: Step, other: Step) -> bool:
    """Return whether no time contradicts it: what training began from counts a run before."""
    mine, theirs = saved(step, run), saved(other, run)
    return mine is None or theirs is None or mine >= theirs - AT_ONCE


def _unrecorded(run: Run, steps: list[Step]) -> list[Placed]:
    """Return steps by time, or by the numbers in their names if no time contradicts these."""
    timed = _by_time(run, steps, _BY_TIME)
    if len(steps) < 2 or not all(step.name.bare is not None for step in steps):
        return timed
    by_number = sorted(timed, key=lambda each: (each[2].name.bare or 0, *each[0]))
    latest = 0.0
    for (time,), _, _ in by_number:
        if time < latest - AT_ONCE:
            return timed
        latest = max(latest, time)
    return [(key, 0, replace(step, placed=_BY_NUMBER)) for key, _, step in by_number]


def _with_latest_last(run: Run, placed: list[Placed]) -> list[Placed]:
    """Move the first step to the end that a pointer calls the latest, if its name counts nothing.

    A pointer that cannot be read places nothing.
    """
    pointers: dict[Location, list[str]] = {}
    with suppress(TransferError):
        pointers = find_pointers(run)
    for at, (key, rank, step) in enumerate(placed):
        latest = latest_source(pointers.get(step.path, ()) if not step.position else ())
        if latest is not None:
            found = key, rank, replace(step, placed=f"by {latest}")
            return [*placed[:at], *placed[at + 1 :], found]
    return placed


def written_after(run: Run, step: Step) -> Step | None:
    """Return the step of its series that was written last, if that is clearly another one."""
    alike = [each for each in run.steps if each.series == step.series and each.parts]
    times = {each.path: saved(each, run) for each in alike}
    last = max(alike, key=lambda each: times[each.path] or 0.0, default=step)
    mine, theirs = times.get(step.path), times.get(last.path)
    if mine is None or theirs is None or theirs - mine <= AT_ONCE:
        return None
    return last


def trainings_of(run: Run, series: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield the steps of each training of a series: one that began again counts less, but later.

    Its steps are those that were clearly written after the one that counts most.
    """
    left = [*series]
    times = {step.path: saved(step, run) for step in series}
    while left:
        newest = times[left[-1].path]
        later = [s for s in left if newest and (times[s.path] or newest) - newest > AT_ONCE]
        yield [step for step in left if step not in later]
        left = later
