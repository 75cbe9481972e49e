"""The steps of a run's folder, by the names that trainers give them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from ckptool.commands.detect import find_checkpoints, folder_at, natural_key
from ckptool.commands.open import open_checkpoint
from ckptool.errors import CkptoolError, NotFound, Unrecognized
from ckptool.formats import latest_markers
from ckptool.storage.retry import NoAnswer
from ckptool.storage.url import Location, within


def _after(words: str) -> str:
    return rf"(?i)(?<![a-z]){words}[-_=]?(\d{{1,18}})(?!\d)"


_STEP = _after("(?:global[-_]?)?steps?")
_ITERATION = _after("iter(?:ation)?s?")
_EPOCH = _after("(?:epoch|ep)")
_NUMBERS = (_STEP, _ITERATION, _after("(?:checkpoint|ckpt)"), _EPOCH)
"""As in ``global_step100``, ``epoch=1-step=200.ckpt``, ``iter_0000100``, ``checkpoint-500``."""
_OF_TRAINER = r"^checkpoint-(\d{1,18})"
"""As transformers' Trainer counts steps; ``checkpoint_0`` of accelerate counts saves."""
_LAST_NUMBER = r"(\d{1,18})(?!.*\d)"
_TYPE = (
    r"(?i)(?<![a-z])(?:(?:mx|nv)?fp|bf|b?float|u?int|nf)(?:4|6|8|16|32|64)(?!\d)"
    r"(?:_?e[2-8]m[0-3](?!\d))?"
    r"|(?<![a-z])i?q[1-8](?:_(?:[01]|[klmsx]+))*(?![a-z0-9])"
    r"|(?<![a-z])w(?:4|8|16)a(?:4|8|16)(?!\d)"
    r"|(?<!\d)[1-8]-?bits?(?![a-z])(?:-\d+g(?![a-z]))?"
)
"""An element type or a quantization, as in ``diffusion_pytorch_model.fp16.safetensors``,
``flux.fp8_e4m3fn.pt``, ``model-q4_0.safetensors``, ``gptq_model-4bit-128g.safetensors``."""
_SHARD = r"\d+-of-\d+"


class Step(Struct, frozen=True):
    """One step of a run: its place, its number if its name has one, and its checkpoints.

    Most are one checkpoint; some trainers save several side by side (``actor``, ``critic``).
    """

    path: Location
    number: int | None
    parts: tuple[Location, ...]

    @property
    def names(self) -> frozenset[str]:
        """Return the names of its checkpoints inside it."""
        return frozenset(str(within(part, self.path)) for part in self.parts)


def steps_of(run: Location) -> list[Step]:
    """Return the steps of a run's folder, oldest first; those without a number come before all.

    Hidden entries are skipped: they are being written, or removed. A folder named like the others
    that holds no checkpoint is a step without parts. If there is no checkpoint below the folder,
    the folder itself may be one. Raises NotFound or Unrecognized if there is no checkpoint at all.
    """
    itself, inner = find_checkpoints(run)
    if itself is not None:
        inner = [path for path in inner if _is_step(path, run)] or [itself]
    hidden = [path for path in inner if any(p.startswith(".") for p in within(path, run).parts)]
    inner = [path for path in inner if path not in hidden]
    if not inner:
        raise Unrecognized(
            f"{run}: no checkpoint in this folder",
            hint="list the known formats: ckptool formats",
        )
    steps = _group(run, inner)
    steps += _without_checkpoint(steps)
    steps += _inside(run, steps)
    steps.sort(key=lambda step: natural_key(str(step.path)))
    return sorted(steps, key=lambda step: -1 if step.number is None else step.number)


def is_run(place: Location) -> bool:
    """Return whether a folder has several steps, and a trainer's file that names the latest.

    ``open_checkpoint`` opens that one; without such a file it raises Several.
    """
    if not place.is_dir():
        return False
    if isinstance(place, Path):
        is_marked = any((place / file).exists() for file in latest_markers())
    else:
        is_marked = not latest_markers().isdisjoint(place.listing)  # requested already
    return is_marked and len(steps_of(place)) > 1


def _is_step(path: Location, run: Location) -> bool:
    """Return whether a checkpoint inside a folder that is a checkpoint itself is a separate step.

    Files numbered from 0 without a gap are one per rank, not one per step.
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
    """Return the part of a relative path that names the step, and the step."""
    for pattern in _NUMBERS:
        for at in range(len(parts) - 1, -1, -1):
            if match := re.search(pattern, _typeless(parts[at])):
                return at, int(match[1])
    if not parts or re.search(_SHARD, parts[-1]):
        return None
    match = re.search(_LAST_NUMBER, _typeless(Path(parts[-1]).stem))
    return (len(parts) - 1, int(match[1])) if match else None


def _typeless(name: str) -> str:
    """Return a name without element types: ``checkpoint-4bit-300`` is step 300."""
    return re.sub(_TYPE, "", name)


def _group(run: Location, checkpoints: Iterable[Location]) -> list[Step]:
    """Return the checkpoints in one step's folder as one step."""
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
    """Yield entries named like steps and beside them that hold no checkpoint."""
    known = {step.path for step in steps}
    patterns = {(path.parent, name_pattern(path.name)) for path in known if _step_in((path.name,))}
    for parent in dict.fromkeys(parent for parent, _ in patterns):
        for name in _names_in(parent):
            path = parent / name
            if path not in known and (parent, name_pattern(name)) in patterns:
                step = _step_in((name,))
                yield Step(path, step[1] if step else None, ())


def _inside(run: Location, steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps in another step's folder that are not read as part of it."""
    alone = [step for step in steps if step.parts == (step.path,) != (run,)]
    folders = {"/".join(within(step.path, run).parts): step for step in alone}
    named: dict[Location, Step] = {}
    for file in folder_at(run).files if folders else ():
        names = file.split("/")
        for at in range(1, len(names)):
            step = folders.get("/".join(names[:at]))
            if step is not None and _says_another(step, names[at:]):
                named[step.path] = step
    for step in named.values():
        others, read = _others_in(step)
        if read is not None:
            inner = _group(step.path, (path for path in others if path not in read))
            yield from (*inner, *_inside(step.path, inner))


def _is_folder(path: Location) -> bool:
    try:
        return path.is_dir()
    except NoAnswer:
        raise
    except OSError:
        return False


def _names_in(folder: Location) -> list[str]:
    """Return the entries of a folder; nothing if it is gone or cannot be listed."""
    try:
        return [path.name for path in folder.iterdir()]
    except NoAnswer:
        raise
    except (NotFound, OSError):
        return []


def name_pattern(name: str) -> str:
    """Return a name without its numbers: steps of one kind share it."""
    return re.sub(r"\d+(?:\.\d+)?(?:e-?\d+)?", "#", name)


def step_named(name: str) -> int | None:
    """Return the training step at the end of a name; None if that may not be a step."""
    matches = (re.search(pattern, name) for pattern in (_STEP, _ITERATION, _OF_TRAINER))
    return next((int(m[1]) for m in matches if m is not None and m.end() == len(name)), None)


def says_step(step: Step) -> bool:
    """Return whether the number in a step's name cannot be a rank, a part or a version.

    As a folder ``checkpoint_3`` is a step; as a file it may be what rank 3 saved.
    """
    words = _NUMBERS if _is_folder(step.path) else [_STEP, _ITERATION, _EPOCH]
    return any(re.search(pattern, _typeless(step.path.name)) for pattern in words)


def holds_steps(step: Step) -> bool:
    """Return whether a step's folder holds others, each in a folder or a file of its own.

    Files that a step as a whole is read from belong to it, whatever their name, such as
    ``global_step1`` of DeepSpeed.
    """
    others, read = _others_in(step)
    return bool(others) and (read is None or not read.issuperset(others))


def _others_in(step: Step) -> tuple[list[Location], set[Location] | None]:
    """Return the checkpoints in a step's folder that have the number of another one.

    And the files and folders that the step is read from, None if that is unknown.
    """
    whole, inner = find_checkpoints(step.path) if _is_folder(step.path) else (None, [])
    others = [path for path in (*step.parts, *inner) if _is_of_another(step, path)]
    if whole is None or not others:
        return others, set()
    try:
        files = [whole / file for file in open_checkpoint(whole).catalog.files]
    except CkptoolError:
        return others, None
    return others, {place for file in files for place in (file, *file.parents)}


def _is_of_another(step: Step, path: Location) -> bool:
    return _says_another(step, within(path, step.path).parts)


def _says_another(step: Step, names: Iterable[str]) -> bool:
    """Return whether a component of a path has the number of another step."""
    found = (re.search(pattern, _typeless(name)) for name in names for pattern in _NUMBERS)
    return any(match is not None and int(match[1]) != step.number for match in found)
