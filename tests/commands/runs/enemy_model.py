"""What must stay of generated runs, said without any code of the package.

A step that is whole is one from which its trainer could go on. The model knows how each was made,
so it needs to look at nothing but the names of what is left, and its bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

State = Literal["whole", "half", "nan", "damaged"]
Snapshot = dict[str, tuple[str, str]]
"""The kind and the content of each file, folder and link, by its path below the sandbox."""


class Saved(Struct):
    """A step as it was made: ``entries`` are its files and folders below the sandbox.

    ``number`` is what its name counts, ``order`` says which was saved after which. ``reason`` is
    why it must stay whatever the rules say, if it must.
    """

    number: int
    order: int
    entries: list[str]
    state: State = "whole"
    reason: str = ""


class Rules(Struct):
    """The options of prune."""

    keep_last: int
    keep_every: int | None = None
    drop: bool = False


class Promise(Struct):
    """The steps that must stay as they are, and those that may lose their optimizer instead."""

    stay: list[Saved] = field(default_factory=list)
    strip: list[Saved] = field(default_factory=list)


def promise(steps: Iterable[Saved], rules: Rules) -> Promise:
    """Return what must stay of a run's steps.

    The newest whole ones, what something points to, what ``keep_every`` asks for, and what is newer
    than the newest whole one: it may be a save under way. Everything, if no step is whole.
    """
    ordered = sorted(steps, key=lambda step: step.order)
    whole = [step for step in ordered if step.state == "whole"]
    newest = whole[-rules.keep_last :]
    promised = Promise()
    for step in ordered:
        every = rules.keep_every is not None and step.number % rules.keep_every == 0
        is_newer = not whole or step.order >= whole[-1].order
        if step.reason or is_newer or step in newest:
            promised.stay.append(step)
        elif every:
            (promised.strip if rules.drop else promised.stay).append(step)
    return promised


def snapshot(sandbox: Path) -> Snapshot:
    """Return everything below a folder. Links are not followed."""
    found: Snapshot = {}
    for head, folders, files in os.walk(sandbox):
        for name in (*folders, *files):
            path = Path(head, name)
            found[str(path.relative_to(sandbox))] = _content(path)
    return found


def _content(path: Path) -> tuple[str, str]:
    if path.is_symlink():
        return "link", os.readlink(path)
    if path.is_dir():
        return "folder", ""
    return "file", hashlib.sha256(path.read_bytes()).hexdigest()


def owner_of(path: str, steps: Iterable[Saved]) -> Saved | None:
    """Return the step that a path belongs to: the one that begins deepest."""
    owners = [
        (len(entry), step)
        for step in steps
        for entry in step.entries
        if path == entry or path.startswith(f"{entry}/")
    ]
    return max(owners, key=lambda pair: pair[0])[1] if owners else None


def find_losses(
    before: Snapshot,
    after: Snapshot,
    steps: list[Saved],
    promised: Promise,
    *,
    strips: bool = False,
) -> list[str]:
    """Return what is lost: changed or gone although it had to stay, or gone only in part.

    If prune ``strips`` steps, one that may go may also stay without its optimizer.
    """
    losses: list[str] = []
    fates: dict[str, dict[str, list[str]]] = {}
    for path, content in before.items():
        step = owner_of(path, steps)
        fate = "same" if after.get(path) == content else "gone" if path not in after else "changed"
        if step is None or step in promised.stay:
            if fate != "same":
                losses.append(f"{path} is {fate}: {_why(step)}")
        elif step not in promised.strip:
            fates.setdefault(step.entries[0], {}).setdefault(fate, []).append(path)
    for entry, of in fates.items():
        files = {fate: paths for fate, paths in of.items() if paths}
        if len(files) > 1 and not (strips and entry in after):
            some = {fate: paths[:3] for fate, paths in files.items()}
            losses.append(f"{entry} is gone or changed in part: {some}")
    return losses


def _why(step: Saved | None) -> str:
    if step is None:
        return "it is no step's"
    return f"{step.reason or 'the rules keep it'} (step {step.number}, {step.state})"


def gone(after: Snapshot, steps: Iterable[Saved]) -> list[Saved]:
    """Return the steps of which nothing is left."""
    return [step for step in steps if not any(entry in after for entry in step.entries)]
