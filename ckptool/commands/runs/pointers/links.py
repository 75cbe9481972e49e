"""Links on a disk that lead into the steps of a run, and what a step's path passes through."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

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
    for link in _links(path):
        own = next((s for place in (link, *link.parents) if (s := homes.get(_real(place)))), None)
        for place in _hops(link):
            for folder in (place, *place.parents):
                step = homes.get(folder)
                if step is not None and step is not own and folder != _real(link):
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


def _real_entries(run: Run) -> Mapping[Path, Step]:
    """Return the steps by the place of each entry, whose own last part may be a link."""
    found = ((on_disk(entry), step) for step in run.steps for entry in step.entries)
    return {_real(path): step for path, step in found if path is not None}


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path.parent)) / path.name


def _links(run: Path) -> Iterator[Path]:
    """Yield the links below a run, and those beside it and in its own folder's place."""
    todo = [os.path.realpath(run)]
    while todo:
        folder = todo.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = error.strerror or str(error)
            raise TransferError(f"{folder}: cannot be searched for links: {reason}") from None
        yield from (Path(entry.path) for entry in entries if entry.is_symlink())
        inner = (entry for entry in entries if entry.is_dir(follow_symlinks=False))
        todo += [entry.path for entry in inner if not is_leftover(entry.name)]
    try:
        beside = sorted(Path(os.path.realpath(run)).parent.iterdir())
    except OSError:
        return
    yield from (path for path in beside if path.is_symlink())


def _hops(path: Path) -> Iterator[Path]:
    """Yield each place that a path leads through, its own links last: where it ends, at the end."""
    todo = list(reversed(path.parts[1:]))
    at, followed = Path(path.anchor), 0
    while todo:
        name = todo.pop()
        if name == "..":
            at = at.parent
            continue
        at = at / name
        if at.is_symlink():
            yield at
            followed += 1
            if followed > _MOST_HOPS:
                return
            target = Path(os.readlink(at))
            at = Path(target.anchor) if target.is_absolute() else at.parent
            todo.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
    yield at
