"""The notes of ckptool: small files in which a run tells later ones what it does, or has done.

Notes lie where others may write, and are copied and downloaded with what they lie beside. So one is
read only if it is this user's own file, which nobody else may write to; and it says no more than
its schema does: numbers within bounds, and names below a folder that ckptool itself derives from
the target. Everything else is refused, with the path of the note.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ckptool.errors import Unsupported
from ckptool.storage.disk import in_the_way, open_unfollowed

Text = Annotated[str, Meta(max_length=4096)]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Time = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Crc = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]

LARGEST = 256 << 20
"""Bytes of a note: millions of files, and no more memory than a large header takes."""
_LONGEST_PART = 255
_UNKNOWN = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that stand for no byte of a file's name."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_AnyNote = TypeVar("_AnyNote", bound=msgspec.Struct)


def open_note(path: Path, flags: int, *, owner: int | None = None) -> int:
    """Open this user's own note, or that of another known ``owner``, created if the flags say so.

    Raises Unsupported if something else is there, FileNotFoundError if nothing is.
    """
    with suppress(FileNotFoundError):  # checked before too: another's may refuse to be opened
        _require_note(os.lstat(path), path, owner)
    descriptor = open_unfollowed(path, flags, 0o644)
    try:
        _require_note(os.fstat(descriptor), path, owner)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_note(path: Path, *, owner: int | None = None, mark: bytes = b"") -> bytes:
    """Return the bytes of a note; raises as ``open_note``, and Unsupported if it is too large.

    Also if it neither begins with a ``mark`` nor ends within it, as a write that was cut off.
    """
    with open(open_note(path, os.O_RDONLY, owner=owner), "rb") as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes > LARGEST:
            raise not_a_note(path, f"it has more than {LARGEST:,} bytes")
        data = stream.read(nbytes)  # which takes memory for as many, whatever there is
    if not mark.startswith(data[: len(mark)]):
        raise in_the_way(path)
    return data


def dump_note(note: msgspec.Struct) -> bytes:
    """Return a note as JSON, which ``parse_note`` reads."""
    return json.dumps(msgspec.to_builtins(note)).encode()


def parse_note(data: bytes, kind: type[_AnyNote], path: object) -> _AnyNote:
    """Parse JSON of a schema, as ckptool writes it; Unsupported if anything is not."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
        schema = kind.__struct_config__.tag
        if schema is not None and (not isinstance(value, dict) or value.get("schema") != schema):
            raise ValueError(f"its schema is not {schema}")  # msgspec lets it be left out
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError, msgspec.ValidationError, Unsupported) as error:
        raise not_a_note(path, str(error)[:200]) from None


def require_plain(names: Iterable[str]) -> None:
    """Raise Unsupported if a name leads anywhere but to a file below a folder."""
    for name in names:
        parts = name.split("/")
        longest = max(len(part.encode(errors="surrogatepass")) for part in parts)
        if (
            not {"", ".", ".."}.isdisjoint(parts)
            or "\0" in name
            or longest > _LONGEST_PART
            or _UNKNOWN.search(name)
        ):
            raise Unsupported(f"{name[:100]!r} is no name of a file below a folder")


def not_a_note(path: object, why: str) -> Unsupported:
    """Return the error for a note that ckptool did not write like this."""
    return Unsupported(
        f"{path}: is not as ckptool writes it: {why}; it is not followed",
        hint="if no ckptool command is at work there, move it away: an output that it belongs to"
        " then starts over",
    )


def require_own_folder(path: Path) -> None:
    """Raise Unsupported if a path is no real folder of this user, on the disk of its parent."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_dev != os.stat(path.parent).st_dev:
        raise in_the_way(path)
    if status.st_uid != os.geteuid() and status.st_uid != _usual_access(path.parent)[0]:
        raise _of_another(path, status.st_uid)


def _require_note(status: os.stat_result, path: Path, owner: int | None) -> None:
    # by a hard link anybody could make another file of this user a note
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise in_the_way(path)
    is_known = status.st_uid in (os.geteuid(), owner)
    if is_known and not status.st_mode & _OTHERS_WRITE:
        return
    if (status.st_uid, stat.S_IMODE(status.st_mode)) == _usual_access(path.parent):
        return
    if not is_known:
        raise _of_another(path, status.st_uid)
    raise Unsupported(
        f"{path}: others may write to it (mode {stat.S_IMODE(status.st_mode):o}), so it is not"
        " followed",
        hint=f"if only ckptool has written to it: chmod go-w {path}",
    )


def _of_another(path: Path, owner: int) -> Unsupported:
    return Unsupported(
        f"{path}: belongs to another user (number {owner}): it is neither followed nor removed",
        hint=f"write to another folder, or check what it is and have it removed: rm -r {path}",
    )


def _usual_access(folder: Path) -> tuple[int, int]:
    """Return the owner and the mode that a new file gets in a folder, if asked for 0600.

    Some file systems know no others: network shares and mounts for containers. (-1, -1) if no file
    can be created.
    """
    probe = folder / f".ckptool-{os.urandom(8).hex()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1, -1
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
        probe.unlink()
    return status.st_uid, stat.S_IMODE(status.st_mode)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name is there twice")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
