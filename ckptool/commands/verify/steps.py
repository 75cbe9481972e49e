"""The steps of a run's folder, by the names that trainers give them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.recognise import below, natural_key
from ckptool.engine.remote_path import Location, within
from ckptool.errors import NotFound, Unrecognised

_NUMBERS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?<![a-z])(?:global[-_]?)?steps?[-_=]?(\d{1,18})(?!\d)",
        r"(?<![a-z])iter(?:ation)?s?[-_=]?(\d{1,18})(?!\d)",
        r"(?<![a-z])(?:checkpoint|ckpt)[-_=]?(\d{1,18})(?!\d)",
        r"(?<![a-z])(?:epoch|ep)[-_=]?(\d{1,18})(?!\d)",
    )
)
"""As in ``global_step100``, ``epoch=1-step=200.ckpt``, ``iter_0000100``, ``checkpoint-500``."""
_LAST_NUMBER = re.compile(r"(\d{1,18})(?!.*\d)")


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
        """What its checkpoints are called inside it."""
        return frozenset(str(within(part, self.path)) for part in self.parts)


def steps_of(run: Location) -> list[Step]:
    """All steps of a run's folder, the oldest first; those without a number before all others.

    A folder that is named as the others are and holds no checkpoint is a step without parts. Where
    nothing below the folder is one, the folder itself may be. Raises NotFound or Unrecognised
    where there is no checkpoint at all.
    """
    whole, found = below(run)
    if whole is not None:
        found = [place for place in found if _is_step(place, run)] or [whole]
    if not found:
        raise Unrecognised(
            f"{run}: no checkpoint is below this folder",
            hint="ckptool formats lists what is recognised",
        )
    steps = _grouped(run, found)
    return sorted([*steps, *_without_checkpoint(steps)], key=_order)


def _is_step(path: Location, run: Location) -> bool:
    """Whether a checkpoint below a folder that is one itself is a step of its own.

    Files that are numbered from 0 without a gap are one a rank, not one a step.
    """
    place = _place(within(path, run).parts)
    if place is None or _is_folder(path):
        return place is not None
    alike = [name for name in _names_in(path.parent) if _pattern(name) == _pattern(path.name)]
    beside = [_place((name,)) for name in alike]
    numbers = {found[1] for found in beside if found is not None}
    return numbers != set(range(len(numbers)))


def _order(step: Step) -> tuple[int, list[tuple[int, int | str]]]:
    return -1 if step.number is None else step.number, natural_key(str(step.path))


def _place(parts: tuple[str, ...]) -> tuple[int, int] | None:
    """Which part of a relative path says the step, and the step."""
    for pattern in _NUMBERS:
        for at in range(len(parts) - 1, -1, -1):
            if found := pattern.search(parts[at]):
                return at, int(found[1])
    found = _LAST_NUMBER.search(Path(parts[-1]).stem) if parts else None
    return (len(parts) - 1, int(found[1])) if found else None


def _grouped(run: Location, candidates: Iterable[Location]) -> list[Step]:
    """Checkpoints that lie in one step's folder, as one step."""
    grouped: dict[Location, tuple[int | None, list[Location]]] = {}
    for one in candidates:
        parts = within(one, run).parts
        place = _place(parts)
        path = one if place is None else run.joinpath(*parts[: place[0] + 1])
        number = None if place is None else place[1]
        grouped.setdefault(path, (number, []))[1].append(one)
    return [Step(path, number, tuple(parts)) for path, (number, parts) in grouped.items()]


def _without_checkpoint(steps: Iterable[Step]) -> Iterator[Step]:
    """What lies beside steps and is called as they are, but holds no checkpoint."""
    known = {step.path for step in steps}
    patterns = {(path.parent, _pattern(path.name)) for path in known if _place((path.name,))}
    for parent in dict.fromkeys(parent for parent, _ in patterns):
        for name in _names_in(parent):
            path = parent / name
            if path not in known and (parent, _pattern(name)) in patterns:
                place = _place((name,))
                yield Step(path, place[1] if place else None, ())


def _is_folder(path: Location) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _names_in(folder: Location) -> list[str]:
    """What lies directly in a folder; nothing where it is gone or cannot be listed."""
    try:
        return [one.name for one in folder.iterdir()]
    except (NotFound, OSError):
        return []


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)
