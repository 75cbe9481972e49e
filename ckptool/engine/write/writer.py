"""The writer of an unfinished output in a store, as noted there: stores have no locks."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckptool.engine.run_options import StageOptions
from ckptool.engine.write.journal import unfinished_parts
from ckptool.engine.write.schemas import PartNote, RemovalNote, StoreNote, Writer
from ckptool.errors import NotFound, Unsupported
from ckptool.storage.note import LARGEST, not_a_note, parse_note
from ckptool.storage.url import WEB

if TYPE_CHECKING:
    from ckptool.storage.url import RemotePath

_AnyNote = TypeVar("_AnyNote", bound=StoreNote | PartNote | RemovalNote)


_REMOVAL = b'{"schema": "ckptool.removal/'


def this_writer() -> Writer:
    """Return the note's description of this process; no two runs have the same."""
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    token = os.urandom(8).hex()
    return Writer(platform.node(), os.getpid(), _start_of(os.getpid()), begun, token)


def is_here(writer: Writer) -> bool:
    """Return whether a writer ran on this machine."""
    return writer.host == platform.node()


def is_running(writer: Writer) -> bool:
    """Return whether a writer is another process of this machine that has not ended."""
    if not is_here(writer) or writer.process == os.getpid():
        return False
    started = _start_of(writer.process)
    return started is not None and started == writer.started


def describe_writer(writer: Writer) -> str:
    """Describe a writer in a few words."""
    return f"process {writer.process} on {writer.host}, {writer.begun}"


def require_writable(target: RemotePath) -> None:
    """Raise Unsupported if nothing can be written to a place in a store, whoever asks."""
    if target.store.scheme in WEB:
        raise Unsupported(f"{target}: cannot be written to: web servers are read-only")
    if target.store.atomic_put and not target.parent.name:
        raise Unsupported(f"{target}: is a whole bucket", hint="name a folder in it")


def require_left(
    target: RemotePath, note: StoreNote, parts: Iterable[PartNote], options: StageOptions
) -> None:
    """Raise Unsupported if another run, of a note and those of its ``parts``, may still write."""
    if note.parts and not options.overwrite:
        raise unfinished_parts(target, note.parts)
    for part in parts:
        require_ended(target, part, "a part of it")
    require_ended(target, note, "it")
    if note.writer is None or options.resume or options.overwrite or is_here(note.writer):
        return
    raise Unsupported(
        f"{target}: holds the unfinished output of {describe_writer(note.writer)}",
        hint="once that has ended, --resume continues it and --overwrite starts over",
    )


def require_ended(target: RemotePath, note: StoreNote | PartNote | None, what: str) -> None:
    """Raise Unsupported if the writer in a note is another running process on this machine."""
    if note is not None and note.writer is not None and is_running(note.writer):
        who = describe_writer(note.writer)
        raise Unsupported(f"{target}: another ckptool is writing {what}: {who}")


def _start_of(process: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None if it has ended."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


def part_note(note: RemotePath, number: int) -> RemotePath:
    """Return where a part, counted from 0, records its writer and what it has written."""
    return note.with_name(f"{note.name}.{number + 1}")


def part_notes(note: RemotePath) -> dict[int, PartNote]:
    """Read the notes of parts that are there, by the part's number; raises as ``read_note``."""
    folder = note.parent
    with suppress(NotFound):
        names = folder.store.find(folder.key, str(folder))
        named = re.compile(re.escape(f"{note.name}.") + "([1-9][0-9]{0,5})").fullmatch
        numbers = sorted(int(match[1]) - 1 for match in map(named, names) if match)
        read = {number: read_note(part_note(note, number), PartNote) for number in numbers}
        return {number: found for number, found in read.items() if found is not None}
    return {}


def read_note(place: RemotePath, kind: type[_AnyNote]) -> _AnyNote | None:
    """Read a note; None if there is none, Unsupported if it is not as ckptool writes it.

    How large it is, is known if its folder was listed.
    """
    if place.store.listed_size(place.key) > LARGEST:
        raise not_a_note(place, f"it has more than {LARGEST:,} bytes")
    try:
        data = place.read_bytes()
    except NotFound:
        return None
    if kind is not RemovalNote and data.startswith(_REMOVAL):
        raise Unsupported(
            f"{place.parent}: its removal was interrupted",
            hint="ckptool prune, on the folder around it, ends the removal",
        )
    return parse_note(data, kind, place)
