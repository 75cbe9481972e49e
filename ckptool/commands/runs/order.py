"""The order of a run's steps: by what their names count, a pointer, what they record, or time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ckptool.commands.detect import require_known
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.runs.contents import AT_ONCE, save_time
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
    named_steps = [step for step in run.steps if step.position]
    other_steps = [step for step in run.steps if not step.position]
    units = _units_in_names([step.position for step in named_steps])
    if named_steps and not units:
        places = _by_time(run, named_steps, _MIXED)
    else:
        places = [_by_position(step, 1, step.position, units, _NAMED) for step in named_steps]
        places.sort(key=_sort_key)
    if other_steps:
        places = _add_steps(run, places, other_steps, units, options)
    return Run(place, tuple(step for _, _, step in places), run.source)


Place = tuple[Key, int, Step]
"""What orders a step among the others, and the step."""


def _sort_key(place: Place) -> tuple[object, ...]:
    """Return what orders a place: a conversion, such as ``step-3_hf``, comes before its step."""
    key, rank, step = place
    match = re.search(r"-v(\d+)(?=\.|$)", step.path.name)
    return key, rank, int(match[1]) if match else 0, -len(step.path.name)


def _by_position(
    step: Step, rank: int, position: Position, units: Sequence[str], words: str
) -> Place:
    """Return the place of a step by its stage and the numbers of a position in some units.

    A position without a step is the end of its epoch.
    """
    numbers = position.numbers(units)
    key = position.stage or 0, *(math.inf if number is None else number for number in numbers)
    counts = (unit for unit, number in zip(units, numbers, strict=True) if number is not None)
    return key, rank, replace(step, placed=words.format(" and ".join(counts)))


def _units_in_names(positions: Sequence[Position]) -> tuple[str, ...]:
    """Return what names count: the steps of epochs, too, if some save within one.

    As timm's ``recovery-3-200`` lies before its ``checkpoint-3``.
    """
    units = _units(positions)
    has_steps = any(position.step is not None for position in positions)
    return ("epoch", "step") if units == ("epoch",) and has_steps else units


def _units(positions: Iterable[Position]) -> tuple[str, ...]:
    """Return what all positions count, epochs before steps; nothing if they differ in that."""
    positions = list(positions)
    has_epochs = bool(positions) and all(position.epoch is not None for position in positions)
    has_steps = bool(positions) and all(position.step is not None for position in positions)
    return ("epoch",) * has_epochs + ("step",) * has_steps


def _by_time(run: Run, steps: Iterable[Step], words: str) -> list[Place]:
    words *= len(run.steps) > 1
    places: list[Place] = [
        ((save_time(step, run) or 0.0,), 0, replace(step, placed=words)) for step in steps
    ]
    places.sort(key=_sort_key)
    for end in range(1, len(places)):
        at = end
        while at and _may_be_copy(places[at], places[at - 1]):
            places[at - 1 : at + 1] = places[at], places[at - 1]
            at -= 1
    return places


def _may_be_copy(later: Place, earlier: Place) -> bool:
    """Return whether the best was saved together with another, which may well be newer."""
    says_best, other = (_BEST.search(step.path.name) for _, _, step in (later, earlier))
    return bool(says_best) and other is None and later[0][0] - earlier[0][0] <= AT_ONCE


def _add_steps(
    run: Run,
    places: list[Place],
    steps: list[Step],
    units: tuple[str, ...],
    options: ReadOptions,
) -> list[Place]:
    """Place steps without a named number among those that have a place, or before them."""
    records = {step.path: recorded_position(step, options) for step in steps if step.parts}
    if not places:
        units = _units(records.values()) if len(records) == len(steps) else ()
    common = _units(step.position for _, _, step in places) or units
    newest = {place[2].home: place for place in sorted(places, key=_sort_key)}
    rest: list[Step] = []
    for step in steps:
        position = records.get(step.path, Position())
        unit = _unit_past(position, newest.get(step.home), options)
        if unit and _may_be_later(run, step, newest[step.home][2]):
            key, _, _ = newest[step.home]
            words = _RECORDED.format(unit)
            places.append(((*key, position.number or 0), 1, replace(step, placed=words)))
        elif units and None not in position.numbers(common):
            places.append(_by_position(step, 0, position, units, _RECORDED))
        else:
            rest.append(step)
    return _move_latest_last(run, [*_by_time_or_number(run, rest), *sorted(places, key=_sort_key)])


def _unit_past(position: Position, newest: Place | None, options: ReadOptions) -> str:
    """Return what a record counts past that of the newest named step, step or epoch; else nothing.

    Names may count from another number than records, or what these count by another word, as
    ``checkpoint_30`` does of an epoch; the last of a trainer may be some steps into an epoch.
    """
    if not position or newest is None:
        return ""
    record = recorded_position(newest[2], options)
    counts = {"step": (position.step, record.step), "epoch": (position.epoch, record.epoch)}
    for unit, (number, newest_number) in counts.items():
        if number is not None and newest_number is not None:
            return unit if number > newest_number else ""
    return ""


def _may_be_later(run: Run, step: Step, other: Step) -> bool:
    """Return whether no time says that a step is the older: it may count an earlier run's steps."""
    time, other_time = save_time(step, run), save_time(other, run)
    return time is None or other_time is None or time >= other_time - AT_ONCE


def _by_time_or_number(run: Run, steps: list[Step]) -> list[Place]:
    """Return steps by time, or by the numbers in their names if no time contradicts these."""
    places = _by_time(run, steps, _BY_TIME)
    if len(steps) < 2 or not all(step.name.bare is not None for step in steps):
        return places
    by_number = sorted(places, key=lambda place: (place[2].name.bare or 0, *place[0]))
    latest_time = 0.0
    for (time,), _, _ in by_number:
        if time < latest_time - AT_ONCE:
            return places
        latest_time = max(latest_time, time)
    return [(key, 0, replace(step, placed=_BY_NUMBER)) for key, _, step in by_number]


def _move_latest_last(run: Run, places: list[Place]) -> list[Place]:
    """Move the step that a pointer calls the latest to the end, if its name counts nothing.

    A pointer that cannot be read places nothing.
    """
    pointers: dict[Location, list[str]] = {}
    with suppress(TransferError):
        pointers = find_pointers(run)
    for at, (key, rank, step) in enumerate(places):
        source = latest_source(pointers.get(step.path, ()) if not step.position else ())
        if source is not None:
            place = key, rank, replace(step, placed=f"by {source}")
            return [*places[:at], *places[at + 1 :], place]
    return places


def written_after(run: Run, step: Step) -> Step | None:
    """Return the step of a step's series that was written last, if it is clearly another one."""
    series = [other for other in run.by_series[step.series] if other.parts]
    times = {other.path: save_time(other, run) for other in series}
    last = max(series, key=lambda other: times[other.path] or 0.0, default=step)
    time, last_time = times.get(step.path), times.get(last.path)
    if time is None or last_time is None or last_time - time <= AT_ONCE:
        return None
    return last


def trainings_of(run: Run, series: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield the steps of each training of a series, which may have begun again from the start.

    The steps of the next one are those that were clearly written after the one that counts most.
    """
    steps = [*series]
    times = {step.path: save_time(step, run) for step in steps}
    while steps:
        newest = times[steps[-1].path]
        rest = [s for s in steps if newest and (times[s.path] or newest) - newest > AT_ONCE]
        yield [step for step in steps if step not in rest]
        steps = rest
