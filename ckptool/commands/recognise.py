"""What a path points at: a checkpoint, a part of one, a folder of several, or none."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckptool.engine.remote_path import Location
from ckptool.engine.sources import Files, LocalSource
from ckptool.errors import CkptoolError, Damaged, NotFound, Unrecognised, UsageError
from ckptool.formats import FORMATS, detect
from ckptool.formats._tracker import latest_folder
from ckptool.formats.base import EXTRA, Format, ScanOptions

_LEVELS = 4
_T = TypeVar("_T")
_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that is a checkpoint of a known format by its names and first bytes."""

    path: Location
    source: Files
    format: Format


def recognise(path: Location, format_name: str | None = None) -> Candidate:
    """The checkpoint that a path means, or what lies there read as ``format_name``.

    Raises NotFound, Unrecognised (with what is there), or UsageError for a format of no such name.
    """
    _require_there(path)
    return bounded(path, lambda: _recognised(path, format_name))


def below(path: Location) -> tuple[Candidate | None, list[Candidate]]:
    """The checkpoint that a folder is as a whole, if it is one, and those that lie below it.

    Raises NotFound where there is no such folder, Unrecognised where it is a file.
    """
    _require_there(path)
    if not path.is_dir():
        raise Unrecognised(f"{path}: a file, not a run's folder")
    source = folder_at(path)
    whole = bounded(path, lambda: _detect_folder(source))
    found = bounded(path, lambda: list(_candidates(path, source)))
    return Candidate(path, source, whole) if whole is not None else None, found


def holds_checkpoint(path: Location) -> bool:
    """Whether a folder is a checkpoint of a known format by its names, whole or not."""
    try:
        return path.is_dir() and detect(folder_at(path)) is not None
    except (CkptoolError, OSError):
        return False


def _require_there(path: Location) -> None:
    if not isinstance(path, Path):
        path.require_there()
        return
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if path.is_symlink():
            target = os.readlink(path)
            raise NotFound(f"{path}: a link to {target}: {_reason(error)}") from None
        raise NotFound(f"{path}: {_reason(error)}", hint=_similar(path)) from None
    except ValueError:
        raise NotFound(f"{str(path)!r}: no path, for it holds a null character") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Unrecognised(f"{path}: a pipe, socket or device, neither a file nor a folder")


def folder_at(path: Location) -> Files:
    """The files below a folder."""
    if isinstance(path, Path):
        return LocalSource.folder(path)
    from ckptool.engine.remote import RemoteSource

    return RemoteSource.folder(path)


def file_at(path: Location) -> Files:
    """A file by itself, with what goes with it."""
    if isinstance(path, Path):
        return LocalSource.file(path)
    from ckptool.engine.remote import RemoteSource

    return RemoteSource.file(path)


def bounded(path: Location, work: Callable[[], _T]) -> _T:
    """The last line of defence against metadata that no check foresaw."""
    try:
        return work()
    except RecursionError:
        raise Damaged(f"{path}: its metadata is nested too deep to be read") from None
    except MemoryError:
        raise Damaged(f"{path}: its metadata needs more memory than there is") from None


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return (error.strerror or "cannot be read").lower()


def _similar(path: Path) -> str | None:
    try:
        names = os.listdir(path.parent)
    except OSError:
        return None
    import difflib

    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]} ?" if close else None


def _recognised(path: Location, format_name: str | None) -> Candidate:
    if format_name is not None:
        return _as_told(path, format_name)
    if path.is_dir():
        return _in_folder(path)
    return _around_file(path)


def _as_told(path: Location, format_name: str) -> Candidate:
    if format_name not in FORMATS:
        raise UsageError(
            f"--from {format_name!r}: no such format", hint="one of " + ", ".join(FORMATS)
        )
    source = folder_at(path) if path.is_dir() else file_at(path)
    return Candidate(path, source, FORMATS[format_name])


def _around_file(path: Location) -> Candidate:
    """The checkpoint that a file is part of, or the file by itself."""
    whole = _whole_around(path) if isinstance(path, Path) or _marks(path.name) else None
    if whole is not None:
        return whole
    source = file_at(path)
    alone = detect(source)
    if alone is not None:
        return Candidate(path, source, alone)
    if not source.files[path.name]:
        raise Unrecognised(f"{path}: the file is empty (0 bytes)")
    head = source.read(path.name, 0, min(8, source.files[path.name]))
    raise Unrecognised(
        f"{path}: no checkpoint format that ckptool knows (it begins with {head.hex(' ')})",
        hint="ckptool formats lists them; --from NAME tries one all the same",
    )


def _whole_around(path: Location) -> Candidate | None:
    """The checkpoint in the file's folder that the file is part of."""
    try:
        folder = folder_at(path.parent)
    except NotFound:
        return None
    found = _detect_folder(folder)
    if found is None or not (path.name in _files_of(found, folder) or _marks(path.name)):
        return None
    return Candidate(path.parent, folder, found)


def _marks(name: str) -> bool:
    """Whether a file name says that the file is only a part of a checkpoint."""
    return name in (".metadata", "metadata.pkl") or name.endswith((".distcp", ".index.json"))


def _files_of(item: Format, source: Files) -> frozenset[str]:
    try:
        return frozenset(item.scan(source, ScanOptions(per_rank=True)).files)
    except CkptoolError:
        return frozenset()


def _in_folder(path: Location) -> Candidate:
    source = folder_at(path)
    found = _detect_folder(source)
    if found is not None:
        return Candidate(path, source, found)
    latest = latest_folder(source)
    if latest is not None:
        return _in_folder(path / latest)
    candidates = list(_candidates(path, source))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise _several(path, candidates)
    if not source.files:
        raise Unrecognised(f"{path}: the folder is empty")
    raise Unrecognised(
        f"{path}: no checkpoint in its {len(source.files):,} files: {_listing(source)}",
        hint="ckptool formats lists what is recognised; --from NAME tries one all the same",
    )


def _detect_folder(source: Files) -> Format | None:
    """The format of a folder as a whole; None where it only holds a single-file checkpoint."""
    if len(source.files) == 1 and "/" not in next(iter(source.files)):
        dcp = FORMATS["dcp"]
        return dcp if dcp.probe(source) else None
    found = detect(source)
    alone = ("safetensors", "torch-save") if len(source.files) == 1 else ("safetensors",)
    return None if found is not None and found.name in alone else found


def _candidates(path: Location, source: Files) -> Iterator[Candidate]:
    """Checkpoints below a folder: subfolders that are one, and single files that are one."""
    folders = source.subfolders()
    covered: set[str] = set()
    for folder in sorted(folders, key=lambda name: (name.count("/"), natural_key(name))):
        if folder.count("/") >= _LEVELS or any(str(p) in covered for p in Path(folder).parents):
            continue
        inner = folders[folder]
        found = _detect_folder(inner)
        if found is not None:
            covered.add(folder)
            yield Candidate(path / folder, inner, found)
    for name in source.files:
        if not any(str(parent) in covered for parent in Path(name).parents):
            yield from _single_file(path, source, name)


def _single_file(path: Location, source: Files, name: str) -> Iterator[Candidate]:
    if not name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")):
        return
    if name.endswith(EXTRA) and name.removesuffix(EXTRA) + ".safetensors" in source.files:
        return
    alone = source.alone(name)
    found = detect(alone)
    if found is not None:
        yield Candidate(path / name, alone, found)


def _several(path: Location, candidates: list[Candidate]) -> Unrecognised:
    candidates = sorted(candidates, key=lambda item: natural_key(str(item.path)))
    shown = [f"  {item.path}  ({item.format.name})" for item in candidates[-_MOST_SHOWN:]]
    more = len(candidates) - len(shown)
    listed = ([f"  ... and {more} more before these"] if more else []) + shown
    return Unrecognised(
        f"{path}: {len(candidates)} checkpoints are below this folder:\n" + "\n".join(listed),
        hint=f"name one of them, such as {candidates[-1].path}",
    )


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """A sort key under which step-9 comes before step-10."""
    parts = enumerate(re.split(r"([0-9]+)", name))
    return [(0, int(part)) if at % 2 else (1, part) for at, part in parts]


def _listing(source: Files) -> str:
    names = list(source.files)
    more = f", and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
