"""The notes of an unfinished output in a store, and who writes it: stores have no locks."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptool.core.layout import Layout
from ckptool.engine.share import Share
from ckptool.engine.write.parts import unfinished_parts
from ckptool.engine.write.schemas import PartNote, RemovalNote, StoreNote, Writer
from ckptool.errors import Denied, NotFound, TransferError, Unsupported
from ckptool.storage.clients.client import hidden_name
from ckptool.storage.clients.schemes import WEB
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.note import LARGEST, dump_note, not_a_note, parse_note
from ckptool.storage.url import RemotePath

if TYPE_CHECKING:
    from ckptool.engine.write.stage import StageOptions

_AnyNote = TypeVar("_AnyNote", bound=StoreNote | PartNote | RemovalNote)


_REMOVAL = b'{"schema": "ckptool.removal/'


def this_writer() -> Writer:
    """Return the note's description of this process; no two runs have the same."""
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    token = os.urandom(8).hex()
    return Writer(platform.node(), os.getpid(), _start_of(os.getpid()), begun, token)


def is_running(writer: Writer) -> bool:
    """Return whether a writer is another process of this machine that has not ended."""
    # of this process's own number: an earlier run, as in a container all may be number 1
    if writer.host != platform.node() or writer.process == os.getpid():
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


def require_ended(target: RemotePath, note: StoreNote | PartNote | None, what: str) -> None:
    """Raise Unsupported if the writer in a note is another running process on this machine."""
    if note is not None and note.writer is not None and is_running(note.writer):
        writer = describe_writer(note.writer)
        raise Unsupported(f"{target}: another ckptool is writing {what}: {writer}")


def _start_of(process: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None if it has ended."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


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


@contextmanager
def naming(target: RemotePath) -> Iterator[None]:
    """Name the target in the error of a store that refuses to change it; a store's kind stays."""
    head = f"{target}: cannot be written to"
    try:
        yield
    except Denied as error:
        raise Denied(f"{head}: {error}", error.hint) from None
    except NotFound as error:
        raise Unsupported(f"{head}: {error.message}", hint=error.hint) from None


class StoreNotes:
    """The note of a run, which keeps readers away from what it writes, and those of its parts.

    The note is in a folder, where all readers see it, and beside a single file. It names the
    ``writer``. In a run in parts each part has a note of its own, beside that of the run: its
    writer, and once it is done the files it has written. ``claim`` is the note of this process.
    """

    def __init__(
        self, target: RemotePath, layout: Layout, options: StageOptions, part: Share | None
    ) -> None:
        self.target = target
        note_path = target.with_name(f".{target.name}.partial.journal")
        self.run = self.claim = target / UNFINISHED if layout.folder else note_path
        self.writer: Writer | None = None
        self.parts: Mapping[int, PartNote] = {}
        """The notes of parts, to be removed before that of the run."""
        self._files = [*layout.sizes]
        self._options = options
        self._part = part
        if part is not None:
            self.claim = self._place_of_part(part.position)

    def read(self) -> StoreNote | None:
        """Read the note of the run; raises as ``read_note``."""
        return read_note(self.run, StoreNote)

    def read_part(self) -> PartNote | None:
        """Read the note of this process's part."""
        return read_note(self.claim, PartNote)

    def read_parts(self) -> Mapping[int, PartNote]:
        """Read the notes of parts that are there, by the part's number from 0 on."""
        names: Collection[str] = ()
        with suppress(NotFound):
            names = self.run.store.find(self.run.parent.key, str(self.run.parent))
        match_name = re.compile(re.escape(f"{self.run.name}.") + "([1-9][0-9]{0,5})").fullmatch
        numbers = sorted(int(match[1]) - 1 for match in map(match_name, names) if match)
        notes = {number: read_note(self._place_of_part(number), PartNote) for number in numbers}
        self.parts = {number: note for number, note in notes.items() if note is not None}
        return self.parts

    def _place_of_part(self, number: int) -> RemotePath:
        return self.run.with_name(f"{self.run.name}.{number + 1}")

    def write(self, **more: Any) -> None:
        """Note this process as the writer of the run."""
        self.writer = self.writer or this_writer()
        self.write_run(writer=self.writer, **more)

    def write_run(self, **more: Any) -> None:
        """Write the note of the run; it has no writer while parts write."""
        run = (self._options.plan, self._options.source)
        self._put(self.run, StoreNote(*run, files=self._files, **more))

    def write_part(self, **more: Any) -> None:
        """Write the note of this process's part."""
        size = 0 if self._part is None else self._part.size
        self._put(self.claim, PartNote(self._options.plan, self._options.source, size, **more))

    def _put(self, place: RemotePath, note: StoreNote | PartNote) -> None:
        with naming(self.target):
            place.write_bytes(dump_note(note))

    def read_writer(self) -> Writer | None:
        """Return who writes what this process has claimed, as noted now."""
        claim = self.read() if self._part is None else self.read_part()
        return None if claim is None else claim.writer

    def require_mine(self) -> None:
        """Raise TransferError if another run has begun to write here since, or none is noted."""
        writer = self.read_writer()
        if writer is None or writer != self.writer:
            cause = "its record is gone" if writer is None else describe_writer(writer)
            raise TransferError(f"{self.target}: another ckptool is writing it too: {cause}")

    def require_left(self, note: StoreNote | None) -> None:
        """Raise Unsupported if another run, whose ``note`` is there, may still be writing here."""
        target, options = self.target, self._options
        if note is None:
            return
        if note.parts and not options.overwrite:
            raise unfinished_parts(target, note.parts)
        for part in self.read_parts().values() if note.parts else ():
            require_ended(target, part, "a part of it")
        require_ended(target, note, "it")
        writer = note.writer
        is_here = writer is None or writer.host == platform.node()
        if writer is not None and not (options.resume or options.overwrite or is_here):
            raise Unsupported(
                f"{target}: holds the unfinished output of {describe_writer(writer)}",
                hint="once that has ended, --resume continues it and --overwrite starts over",
            )

    def require_removal(self) -> None:
        """Raise Denied if nothing may be removed: the note would stay for ever.

        No object has this name, which makes no difference to a store.
        """
        probe = self.run.with_name(hidden_name(self.run.name))
        with naming(self.target):
            self.run.store.remove([probe.key], f"{self.run}: a test removal")

    def remove(self) -> None:
        """Remove the notes of parts, then the one that says how many there are."""
        notes = [*map(self._place_of_part, self.parts), self.claim]
        self.run.store.remove([note.key for note in notes], str(self.claim))
        self.writer = None
