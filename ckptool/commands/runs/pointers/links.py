"""Links on a disk that lead into the steps of a run, and what a step's path passes through."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache

from ckptool.commands.runs.steps import Run, Step
from ckptool.engine.write.removal import is_leftover
from ckptool.errors import TransferError
from ckptool.storage.place import on_disk

_MOST_HOPS = 40
"""As many links as Linux follows of one path (``MAXSYMLINKS``)."""


def linked_steps(run: Run) -> Iterator[tuple[str, Step]]:
    """Yield the steps that a link in or beside a run leads to or through, each with the link.

    All links of a chain count: without one in its middle the last leads nowhere. Raises
    TransferError if a folder cannot be searched.
    """
    if (path := on_disk(run.path)) is None:
        return
    homes, base = _real_entries(run), os.path.realpath(path)
    for link in _links(base):
        holder = next((homes[place] for place in upwards(link) if place in homes), None)
        for end in _hops(link):
            for place in upwards(end):
                step = homes.get(place)
                if step is not None and step is not holder and place != link:
                    yield os.path.relpath(link, base), step


def passes_link(step: Step, run: Run) -> str | None:
    """Return why an entry of a step is not simply below the run: a link, or a way through one."""
    for entry in filter(None, map(on_disk, step.entries)):
        if entry.is_symlink():
            return f"a symbolic link to {os.readlink(entry)}"
        for folder in entry.parents:
            if folder == run.path:
                break
            if folder.is_symlink():
                return f"a symbolic link leads to {entry.resolve()}"
    return None


def _real_entries(run: Run) -> Mapping[str, Step]:
    """Return the steps by the place of each entry, whose own last part may be a link."""
    real = cache(os.path.realpath)
    entries = ((on_disk(entry), step) for step in run.steps for entry in step.entries)
    paths = ((path, step) for path, step in entries if path is not None)
    return {os.path.join(real(path.parent), path.name): step for path, step in paths}


def upwards(path: str) -> Iterator[str]:
    """Yield a path and the folders around it, but for the root of a disk or a run."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _links(base: str) -> Iterator[str]:
    """Yield the links below a run's real place, and those beside it and in its own place."""
    todo = [base]
    while todo:
        folder = todo.pop()
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = error.strerror or str(error)
            raise TransferError(f"{folder}: cannot be searched for links: {reason}") from None
        yield from (entry.path for entry in entries if entry.is_symlink())
        inner = (entry for entry in entries if entry.is_dir(follow_symlinks=False))
        todo += [entry.path for entry in inner if not is_leftover(entry.name)]
    parent = os.path.dirname(base)
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return
    paths = (os.path.join(parent, name) for name in names)
    yield from (path for path in paths if os.path.islink(path))


def _hops(link: str) -> Iterator[str]:
    """Yield each place that a link in a real folder leads through, and where it ends.

    Raises TransferError if a place cannot be looked at.
    """
    at, _, name = link.rpartition("/")
    todo, count = [name], 0
    while todo:
        name = todo.pop()
        if name == "..":
            at = at.rpartition("/")[0]
            continue
        place = f"{at}/{name}"
        try:
            target = os.readlink(place)
        except PermissionError as error:
            raise TransferError(f"{link}: cannot be followed: {error.strerror}") from None
        except OSError:  # it is no link, or nothing
            at = place
            continue
        yield place
        count += 1
        if count > _MOST_HOPS:
            return
        at = "" if target.startswith("/") else at
        todo.extend(part for part in reversed(target.split("/")) if part not in ("", "."))
    yield at
