"""What is already at a target: files that ckptool wrote, which go, and others, which stay.

Noted files are recognized by size and time, those being written by size. An inode number alone
proves nothing: a copy has others, and the file system reuses those of removed files.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ckptool.core.text import list_some, plural
from ckptool.errors import Committed, TransferError, Unsupported
from ckptool.storage.commit_note import Stamp, side_name
from ckptool.storage.disk import (
    folder_identity,
    is_real_folder,
    open_folder,
    rename_new,
)

if TYPE_CHECKING:
    from ckptool.core.layout import Layout
    from ckptool.engine.write.stage import StageOptions


def stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    """Return the stamps of those files that exist in a folder."""
    return {n: (s.st_size, s.st_mtime_ns) for n, s in statuses(folder, names).items()}


def statuses(folder: Path, names: Iterable[str]) -> dict[str, os.stat_result]:
    """Return the statuses of names below a folder, in their order; no link is followed."""
    names = list(names)
    result = {}
    for name, inner, leaf in _each_below(folder, names):
        with suppress(FileNotFoundError):
            result[name] = os.stat(leaf, dir_fd=inner, follow_symlinks=False)
    return {name: result[name] for name in names if name in result}


def _each_below(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield names below a folder with the open folder of each and the last part of the name.

    Those of each folder come together; those behind a link, or in no folder, are left out.
    """
    by_parent: dict[str, list[str]] = {}
    for name in names:
        by_parent.setdefault(name.rpartition("/")[0], []).append(name)
    for parent, inside in by_parent.items():
        with suppress(FileNotFoundError, NotADirectoryError), open_folder(folder, parent) as inner:
            for name in inside:
                yield name, inner, name.rpartition("/")[2]


def stands_whole(folder: Path, inode: int | None, files: Mapping[str, Stamp]) -> bool:
    """Return whether a folder is the one that was noted, with each of its files unchanged."""
    is_same = inode is not None and folder_identity(folder) == inode
    return is_same and stamps(folder, files) == files


def changed_files(folder: Path, files: Mapping[str, Stamp]) -> list[str]:
    """Return the files in a folder that are not as noted."""
    return sorted(name for name, now in stamps(folder, files).items() if now != files[name])


def remove_staged(folder: Path, sizes: Mapping[str, int]) -> None:
    """Remove a folder and the files that ckptool wrote into it; nothing if there is more.

    Raises Unsupported if something else is in it: then all of it stays.
    """
    require_no_foreign(folder, sizes)
    remove_own(folder, written_files(folder, sizes))
    folder.rmdir()


def require_no_foreign(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise Unsupported if something in a folder cannot be what ckptool writes, complete or not.

    ``sizes`` are the bytes of each of its complete files.
    """
    foreign = kept_entries(folder, written_files(folder, sizes))
    if foreign:
        raise Unsupported(
            f"{folder}: holds {list_some(foreign)}, which ckptool did not write or did not record;"
            " nothing in it was removed",
            hint=f"check what it is, then move it away: mv {folder / foreign[0]} ELSEWHERE",
        )


def require_whole(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise TransferError if a file that was written is gone, or has another size in bytes."""
    sizes_now = {name: nbytes for name, (nbytes, _) in stamps(folder, sizes).items()}
    missing = [name for name, nbytes in sizes.items() if sizes_now.get(name) != nbytes]
    if missing:
        raise TransferError(f"{list_some(missing)}: removed or cut short after it was written")


def written_files(folder: Path, sizes: Mapping[str, int]) -> dict[str, os.stat_result]:
    """Return the statuses of files in a folder that a run has written, complete or not."""
    return {
        name: status
        for name, status in statuses(folder, sizes).items()
        if stat.S_ISREG(status.st_mode) and status.st_size <= sizes[name]
    }


_STAYS = frozenset((errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR))
"""Why a folder is not removed: something else is in it, it is a link, or it is gone."""


def kept_entries(folder: Path, own_files: Collection[str]) -> list[str]:
    """List the entries of a folder beside the checkpoint's ``own_files``; folders end with ``/``.

    Links are entries like files. A folder that contains one of the ``own_files`` is not one entry.
    """
    return sorted(_walk_kept(folder, "", frozenset(own_files), _parents(own_files)))


def _walk_kept(
    folder: Path, head: str, own_files: frozenset[str], parents: frozenset[str]
) -> Iterable[str]:
    with os.scandir(folder / head) as entries:
        for entry in entries:
            name = head + entry.name
            if name in own_files:
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield name
            elif name in parents:
                yield from _walk_kept(folder, name + "/", own_files, parents)
            else:
                yield name + "/"


def _parents(files: Iterable[str]) -> frozenset[str]:
    """Return the folders that files lie in, at any depth."""
    return frozenset(str(parent) for file in files for parent in PurePosixPath(file).parents)


def in_conflict(folder: Path, own_files: Collection[str], new: Iterable[str]) -> list[str]:
    """List the entries of a folder beside ``own_files`` that are in the place of ``new`` files."""
    names = {_obstacle(folder, frozenset(own_files), name) for name in new}
    return sorted(name for name in names if name is not None)


def _obstacle(folder: Path, own_files: frozenset[str], name: str) -> str | None:
    for parent in [*PurePosixPath(name).parents][-2::-1]:
        path = folder / parent
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            return None if str(parent) in own_files else str(parent)
    return name if name not in own_files and os.path.lexists(folder / name) else None


def require_no_conflict(target: object, names: Collection[str]) -> None:
    """Raise Unsupported if ``names``, which are not the old checkpoint's, are in the way."""
    if names:
        raise Unsupported(
            f"{target}: {list_some(names)}: not part of the checkpoint there, and the"
            " new one has files of these names",
            hint="move them away, or write elsewhere; ckptool never removes files that it did "
            "not write",
        )


def refuse_existing(target: Path, layout: Layout, options: StageOptions) -> None:
    """Raise Unsupported if something exists where output goes, and may not be replaced."""
    existing = [path for path in outputs(target, layout) if os.path.lexists(path)]
    for path in existing:
        _require_kind(path, layout)
    if existing and not options.overwrite:
        verb, pronoun = ("exists", "it") if len(existing) == 1 else ("exist", "them")
        raise Unsupported(
            f"{', '.join(map(str, existing))} already {verb}",
            hint=f"--overwrite replaces {pronoun} once all is written, if that is a checkpoint",
        )
    for path in existing:
        _require_replaceable(path, target, layout, options.own)


def outputs(target: Path, layout: Layout) -> list[Path]:
    """Return what will exist at the end: the target folder, or file and those beside it."""
    if layout.folder:
        return [target]
    files = [target.parent / name for name in layout.sizes]
    side = side_name(target.name)
    if side is None or target.with_name(side) in files:
        return files
    return [target.with_name(side), *files]


def _require_kind(path: Path, layout: Layout) -> None:
    """Raise Unsupported for a file in the place of a folder, or a folder in that of a file."""
    if path.is_dir() != layout.folder:
        kinds = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
        raise Unsupported(
            f"{path}: is {kinds[0]}, but {kinds[1]} would be written",
            hint=f"write elsewhere, or move it away: mv {path} ELSEWHERE",
        )


def _require_replaceable(
    path: Path, target: Path, layout: Layout, own_files: Collection[str] | None
) -> None:
    """Raise Unsupported if --overwrite would replace a file that is not a checkpoint's."""
    if not layout.folder:
        if own_files is None or path.name not in own_files:
            raise not_replaced(path, target)
        return
    if path.is_symlink():
        raise Unsupported(
            f"{path}: is a link, and is not replaced", hint=f"name the folder {path.resolve()}"
        )
    if any(path.iterdir()) and own_files is None:
        raise not_replaced(path, target)
    require_no_conflict(path, in_conflict(path, own_files or (), layout.sizes))


def already_in_store(target: object, names: Sequence[str], hint: str) -> Unsupported:
    """Return the error for existing files in the place of the output."""
    example = f"{plural(len(names), 'file')}, such as {names[0]}"
    return Unsupported(f"{target} already exists ({example})", hint=hint)


def not_known(note: object, folder: object, names: Sequence[str], *, resumes: bool) -> Unsupported:
    """Return the error for files that a store's note speaks of, and that nothing else knows.

    Anybody who may write to the store may have written the note, so whoever ``resumes`` by it has
    not asked for what it says to be replaced.
    """
    advice = "--overwrite starts over, if that is a checkpoint; or " if resumes else ""
    return Unsupported(
        f"{note}: speaks of {list_some(names)}, which this run does not write, and which is not"
        " known to be a checkpoint's; nothing was removed",
        hint=f"{advice}write elsewhere; or check what it is, and remove all that is in {folder}",
    )


def charged_note(remains: Mapping[str, int]) -> str:
    """Return what to do about objects, with their bytes, that a store did not let be removed."""
    return (
        "remove what could not be deleted, as the store charges for it: at most"
        f" {sum(remains.values()):,} bytes of {list_some(list(remains))} (parts of unfinished"
        " files: abort their multipart uploads, or have a lifecycle rule do it)"
    )


def nothing_to_resume(target: object) -> Unsupported:
    """Return the error for a --resume where no run was interrupted."""
    return Unsupported(
        f"{target}: there is no partial output to resume",
        hint="leave out --resume to write it from the start",
    )


def not_replaced(path: object, target: object) -> Unsupported:
    """Return the error for an --overwrite of what is not a checkpoint, or not ckptool's."""
    if path == target:
        message = f"{path}: not a checkpoint, and is not replaced"
    else:
        message = (
            f"{path}: ckptool did not write it, and does not replace it, but would read it as a"
            f" part of {target}"
        )
    return Unsupported(message, hint=f"write elsewhere, or move it away: mv {path} ELSEWHERE")


def left_behind(
    target: Path, error: OSError, options: StageOptions, *, done: bool = True
) -> TransferError:
    """Return the error after the commit, or while one that was interrupted is rolled back."""
    reason = error.strerror or error
    option = "--resume"
    if options.overwrite and not options.resume:
        option = "--resume in place of --overwrite"
    hint = f"the next command that writes there, such as the same with {option}, finishes it"
    if done:
        message = f"{target}: the new one is complete, but cleaning up failed: {reason}"
        return Committed(message, hint=hint)
    message = f"{target}: the commit of an interrupted run could not be rolled back: {reason}"
    return TransferError(message, hint=hint)


def move_kept(old: Path, new: Path, own_files: Collection[str]) -> list[str]:
    """Rename all but ``own_files`` from one folder into another; return what could not be moved."""
    names = [name.rstrip("/") for name in kept_entries(old, own_files)]
    return [unmoved for name in names for unmoved in _move(old, new, name)]


def _move(old: Path, new: Path, name: str) -> list[str]:
    source, target = old / name, new / name
    _make_parents(old, new, PurePosixPath(name))
    if not os.path.lexists(target):
        rename_new(source, target)
        return []
    if any(path.is_symlink() or not path.is_dir() for path in (source, target)):
        return [name]
    names = [f"{name}/{inner}" for inner in sorted(os.listdir(source))]
    unmoved = [path for inner in names for path in _move(old, new, inner)]
    if not unmoved:
        source.rmdir()
    return unmoved


def _make_parents(old: Path, new: Path, name: PurePosixPath) -> None:
    for parent in [*name.parents][-2::-1]:
        if not is_real_folder(new / parent):
            (new / parent).mkdir()
            (new / parent).chmod((old / parent).stat().st_mode & 0o7777)


def keep_modes(old: Path, new: Path, files: Iterable[str]) -> None:
    """Give a new folder, and what in it the old one has too, the old one's owner and mode."""
    names = list(files)
    for name in sorted({*_parents(names), *names}):
        keep_mode(old / name, new / name)


def keep_mode(old: Path, new: Path) -> None:
    """Give a file or folder the owner and the mode of the one it replaces, where one stands.

    The owner and the group as far as the user may: what was private to a group stays so.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        old_status, new_status = os.lstat(old), os.lstat(new)
        if stat.S_IFMT(old_status.st_mode) != stat.S_IFMT(new_status.st_mode):
            return
        # each by itself, as one may be refused; the group first, as only an owner may change it
        for owner, group in ((-1, old_status.st_gid), (old_status.st_uid, -1)):
            if owner not in (-1, new_status.st_uid) or group not in (-1, new_status.st_gid):
                with suppress(OSError):  # not allowed, or none that this machine knows
                    os.chown(new, owner, group)
        if stat.S_IMODE(old_status.st_mode) != stat.S_IMODE(new_status.st_mode):
            new.chmod(stat.S_IMODE(old_status.st_mode))


def remove_own(folder: Path, own_files: Iterable[str]) -> None:
    """Remove the ``own_files`` of a folder, and the folders in it that are then empty."""
    files = list(own_files)
    for _, inner, leaf in _each_below(folder, files):
        with suppress(FileNotFoundError):
            os.unlink(leaf, dir_fd=inner)
    remove_emptied(folder, files)


def remove_emptied(folder: Path, files: Iterable[str]) -> None:
    """Remove the folders that the files lay in, as far as they are empty; not ``folder`` itself."""
    inner = _parents(files) - {"."}
    deepest_first = sorted(inner, key=lambda name: name.count("/"), reverse=True)
    for _, descriptor, leaf in _each_below(folder, deepest_first):
        try:
            os.rmdir(leaf, dir_fd=descriptor)
        except OSError as error:
            if error.errno not in _STAYS:
                raise
