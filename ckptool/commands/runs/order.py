"""The order of a run's steps: by what their names count, a pointer, what they record, or time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.runs.contents import saved
from ckptool.commands.runs.names import Position
from ckptool.commands.runs.pointers import find_pointers
from ckptool.commands.runs.records import recorded_position
from ckptool.commands.runs.search import find_run
from ckptool.commands.runs.steps import Run, Step
from ckptool.errors import TransferError
from ckptool.storage.url import Location

NAMED = "by the {} in its name"
_RECORDED = "by the {} that it records"
_BY_TIME = "by the time at which it was saved: no name says what it counts"
_MIXED = "by the time at which it was saved: some names count epochs, others steps"
_BY_NUMBER = "by the number in its name, which agrees with the time at which it was saved"
_LATEST = re.compile(r"(?i)(?:.*[^a-z])?(?:latest|last|newest|current)(?:[^a-z].*)?")
_AT_ONCE = 1.0
"""Seconds: files that were written together, as by a copy, are not in the order of their times."""

Key = tuple[float, ...]


def open_run(place: Location, options: ReadOptions = AS_DETECTED) -> Run:
    """Return a run with its steps, oldest first. Raises as ``find_run`` does, and NoAnswer.

    Steps that neither a name, a pointer nor a record places come before the others.
    """
    run = find_run(place)
    named = [step for step in run.steps if step.position]
    others = [step for step in run.steps if not step.position]
    counted = _counted([step.position for step in named])
    if named and not counted:
        placed = _by_time(run, named, _MIXED)
    else:
        placed = [(_key(step.position, counted), 1, _said(step, NAMED, counted)) for step in named]
        placed.sort(key=_place)
    if others:
        placed = _with_others(run, placed, others, counted, options)
    return Run(place, tuple(step for _, _, step in placed), run.source)


Placed = tuple[Key, int, Step]


def _place(placed: Placed) -> tuple[object, ...]:
    key, rank, step = placed
    match = re.search(r"-v(\d+)(?=\.|$)", step.path.name)
    return key, rank, int(match[1]) if match else 0


def _said(step: Step, words: str, counted: Sequence[str]) -> Step:
    return replace(step, placed=words.format(" and ".join(counted)))


def _counted(positions: Iterable[Position]) -> tuple[str, ...]:
    """Return what all positions count, epochs before steps; nothing if they differ in that."""
    found = list(positions)
    has_epochs = bool(found) and all(each.epoch is not None for each in found)
    has_steps = bool(found) and all(each.step is not None for each in found)
    return ("epoch",) * has_epochs + ("step",) * has_steps


def _key(position: Position, counted: Sequence[str]) -> Key:
    numbers = {"epoch": position.epoch, "step": position.step}
    return (position.stage or 0, *(numbers[each] or 0 for each in counted))


def _by_time(run: Run, steps: Iterable[Step], words: str) -> list[Placed]:
    timed = [((saved(step, run) or 0.0,), 0, replace(step, placed=words)) for step in steps]
    return sorted(timed, key=_place)


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
    of_record = [
        (_key(records[step.path], counted), 0, _said(step, _RECORDED, counted))
        for step in others
        if counted and _has(records.get(step.path), counted)
    ]
    known = {step.path for _, _, step in of_record}
    rest = _unrecorded(run, [step for step in others if step.path not in known])
    placed = [*rest, *sorted([*named, *of_record], key=_place)]
    latest = _latest(run, placed)
    if latest is not None:
        placed.remove(latest)
        placed.append(latest)
    return placed


def _has(position: Position | None, counted: Sequence[str]) -> bool:
    numbers = {"epoch": position.epoch, "step": position.step} if position is not None else {}
    return all(numbers.get(each) is not None for each in counted)


def _unrecorded(run: Run, steps: list[Step]) -> list[Placed]:
    """Return steps by time, or by the numbers in their names if no time contradicts these."""
    timed = _by_time(run, steps, _BY_TIME)
    if len(steps) < 2 or not all(step.name.bare is not None for step in steps):
        return timed
    by_number = sorted(timed, key=lambda each: (each[2].name.bare or 0, *each[0]))
    latest = 0.0
    for (time,), _, _ in by_number:
        if time < latest - _AT_ONCE:
            return timed
        latest = max(latest, time)
    return [(key, 0, replace(step, placed=_BY_NUMBER)) for key, _, step in by_number]


def _latest(run: Run, placed: list[Placed]) -> Placed | None:
    """Return the step that a pointer calls the latest, if its own name counts nothing."""
    pointers: dict[Location, list[str]] = {}
    with suppress(TransferError):  # a pointer that cannot be read places nothing
        pointers = find_pointers(run)
    for at in placed:
        step, names = (
            at[2],
            [s for s in pointers.get(at[2].path, ()) if _LATEST.fullmatch(_name(s))],
        )
        if names and not step.position:
            placed[placed.index(at)] = found = (*at[:2], replace(step, placed=f"by {names[0]}"))
            return found
    return None


def _name(source: str) -> str:
    return source.rpartition("/")[2]


def written_after(run: Run, step: Step) -> Step | None:
    """Return the step of its series that was written last, if that is clearly another one."""
    alike = [each for each in run.steps if each.series == step.series and each.parts]
    times = {each.path: saved(each, run) for each in alike}
    last = max(alike, key=lambda each: times[each.path] or 0.0, default=step)
    mine, theirs = times.get(step.path), times.get(last.path)
    if mine is None or theirs is None or theirs - mine <= _AT_ONCE:
        return None
    return last
