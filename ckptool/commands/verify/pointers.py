"""Pointers to a step of a run: small files that name it, symbolic links, the Trainer's best."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptool.commands.verify.steps import Step
from ckptool.errors import CkptoolError, NotFound
from ckptool.storage.url import Location, within

_LONGEST_POINTER = 4096
_TRAINER_STATE = "trainer_state.json"
_LARGEST_STATE = 64 << 20


def find_pointers(run: Location, steps: Sequence[Step]) -> dict[Location, str]:
    """Return the steps that something beside them or in the run names, each with its pointer.

    A pointer is a link, a small file such as ``latest`` (DeepSpeed, Megatron-LM), or the newest
    ``trainer_state.json`` of transformers' Trainer, which names the best checkpoint.
    """
    pointers: dict[Location, str] = {}
    for folder in dict.fromkeys([run, *(step.path.parent for step in steps)]):
        beside = [step for step in steps if step.path.parent == folder]
        for path in _small_files(folder):
            named = steps if folder == run else beside
            _add_named(_read_text(path), path.name, named, pointers)
        if isinstance(folder, Path):
            for link in (path for path in folder.iterdir() if path.is_symlink()):
                _add_target(link, str(within(link, run)), steps, pointers)
        for step in reversed(beside):
            best = _best_checkpoint(step)
            if best is not None:
                _add_named(best, f"{step.path.name}/{_TRAINER_STATE}", beside, pointers)
                break
    return pointers


def find_links(run: Location, steps: Sequence[Step]) -> dict[Location, str]:
    """Return the steps that a link elsewhere in the run leads into, each with such a link."""
    pointers: dict[Location, str] = {}
    for link in _links_below(run, steps) if isinstance(run, Path) else ():
        others = [step for step in steps if step.path not in link.parents]
        _add_target(link, str(within(link, run)), others, pointers)
    return pointers


def _links_below(run: Path, steps: Sequence[Step]) -> Iterator[Path]:
    """Yield the links in a run and in its steps, also if a link leads to a step's folder."""
    paths = [s.path for s in steps if isinstance(s.path, Path) and not s.path.is_symlink()]
    for root in (run, *paths):
        for head, folders, files in os.walk(root):
            below = [Path(head, name) for name in (*folders, *files)]
            yield from (path for path in below if path.is_symlink())
            folders[:] = [name for name in folders if Path(head, name) not in paths]


def _small_files(folder: Location) -> Iterator[Location]:
    """Yield the files directly in a folder that are small enough to be a name."""
    with suppress(NotFound):
        if isinstance(folder, Path):
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.stat().st_size <= _LONGEST_POINTER:
                    yield path
        else:
            for name, info in folder.listing.items():
                if name and "/" not in name and info.nbytes <= _LONGEST_POINTER:
                    yield folder / name


def _read_text(path: Location) -> str:
    with suppress(CkptoolError, OSError):
        return path.read_bytes().decode("utf-8", "replace").strip()
    return ""


def _add_named(
    text: str, source: str, steps: Sequence[Step], pointers: dict[Location, str]
) -> None:
    """Add the steps of which a text is the name, the number, or a path to or into."""
    names = {part for part in text.split("/") if part}
    number = int(text) if text.isdecimal() and len(text) < 20 else None
    for step in steps:
        if step.path.name.strip() in names or (number is not None and step.number == number):
            pointers.setdefault(step.path, source)


def _add_target(
    link: Path, source: str, steps: Sequence[Step], pointers: dict[Location, str]
) -> None:
    with suppress(OSError, RuntimeError):
        target = link.resolve()
        for step in steps:
            if isinstance(step.path, Path) and not step.path.is_symlink():
                real = step.path.resolve()
                if real == target or real in target.parents:
                    pointers.setdefault(step.path, source)


def _best_checkpoint(step: Step) -> str | None:
    """Return the best checkpoint according to the state of transformers' Trainer in a step."""
    file = step.path / _TRAINER_STATE
    with suppress(CkptoolError, OSError, ValueError):
        if isinstance(file, Path) and file.stat().st_size > _LARGEST_STATE:
            return None
        state: Any = json.loads(file.read_bytes())
        best = state.get("best_model_checkpoint") if isinstance(state, Mapping) else None
        return best if isinstance(best, str) else None
    return None
