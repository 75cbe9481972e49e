"""Files that ckptool knows again: by size and time those noted, by size those being written.

An inode number alone proves nothing: a copy has others, and the file system gives those of removed
files to new ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ckptool.engine.disk import identity, is_real_file
from ckptool.engine.replaced import kept_entries, remove_own
from ckptool.errors import CannotDo

Stamp = tuple[int, int]
"""The size of a file and the time of its last change, in nanoseconds."""


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of what stands at a path, None where nothing does; follow no link."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size, found.st_mtime_ns


def stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    """Return the stamps of those of the files that stand in a folder."""
    found = {name: stamp(folder / name) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def stands_whole(folder: Path, inode: int | None, files: Mapping[str, Stamp]) -> bool:
    """Tell whether a folder is the one that was noted, with each of its files as it was."""
    return inode is not None and identity(folder) == inode and stamps(folder, files) == files


def changed_files(folder: Path, files: Mapping[str, Stamp]) -> list[str]:
    """Return the files that stand in a folder, and not as they were noted."""
    return sorted(name for name, one in stamps(folder, files).items() if one != files[name])


def remove_staged(folder: Path, sizes: Mapping[str, int]) -> None:
    """Remove a folder and the files that ckptool wrote into it; nothing where there is more.

    CannotDo where something else lies in it: then all of it stays.
    """
    require_no_foreign(folder, sizes)
    remove_own(folder, _written(folder, sizes))
    folder.rmdir()


def require_no_foreign(folder: Path, sizes: Mapping[str, int]) -> None:
    """CannotDo where something in a folder cannot be what ckptool writes, whole or in part.

    ``sizes`` are the bytes that each of its files has once it is whole.
    """
    foreign = kept_entries(folder, _written(folder, sizes))
    if foreign:
        raise CannotDo(
            f"{folder}: holds {listed(foreign)}, which ckptool did not write or did not note:"
            " nothing in it is removed",
            hint=f"look what it is, and move it away: mv {folder / foreign[0]} ELSEWHERE",
        )


def listed(names: Collection[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f", and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join([*names][:8])}{more}"


def _written(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """The files in a folder that a run has written, as far as it came."""
    return [
        name
        for name, nbytes in sizes.items()
        if is_real_file(folder / name) and os.lstat(folder / name).st_size <= nbytes
    ]
