"""The run's own folders, which are gone at the end."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.bench.save_folders import DiskFolder, SaveFolder, StoreFolder
from ckptool.errors import Denied, NotFound, TransferError, Unsupported
from ckptool.storage.url import RemotePath

if TYPE_CHECKING:
    from ckptool.commands.bench.meeting import Meeting

_PREFIX = "ckptool-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
"""The names that ``tempfile.mkdtemp`` makes (Python 3.11 to 3.14)."""


class Folders(Struct, frozen=True):
    """Where the ranks work: ``parent`` / ``name``, or as ``name`` below the URL ``store``.

    ``temporary`` is this process's own, with the TMPDIR of its ranks and what they print.
    """

    temporary: str
    parent: str
    name: str
    store: str | None = None

    @property
    def scratch(self) -> Path:
        return Path(self.parent, self.name)

    @property
    def saves(self) -> SaveFolder:
        """The folder that is saved into."""
        if self.store is None:
            return DiskFolder(self.scratch)
        return StoreFolder(RemotePath.parse(self.store) / self.name)


@contextmanager
def scratch(out: SaveFolder, *, leads: bool = True) -> Iterator[Folders]:
    """Make the run's own folders, which are removed at the end.

    A process that does not lead makes only what is its own; ``join_scratch`` has the rest.
    """
    temporary = tempfile.mkdtemp(prefix=_PREFIX)  # with sockets, whose paths must be short
    disk_folders = [DiskFolder(Path(temporary))]
    folders = Folders(
        temporary,
        parent=str(out.disk.resolve() if out.disk else tempfile.gettempdir()),
        name="",
        store=None if out.disk else str(out.target),
    )
    try:
        (Path(temporary) / "logs").mkdir()
        if not leads:
            yield folders
            return
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folders.parent))
        disk_folders.append(DiskFolder(work))
        folders = replace(folders, name=work.name)
        if out.disk is not None:
            yield folders
        else:
            with scratch_in_store(out / work.name):
                yield folders
    finally:
        for folder in disk_folders:
            folder.remove()


@contextmanager
def join_scratch(folders: Folders, meeting: Meeting) -> Iterator[Folders]:
    """Return the folders with the name that rank 0 made, for every rank.

    A rank on a machine with a disk of its own makes the folder there, and removes it at the end.
    Raises TransferError if the name is none that ``scratch`` makes.
    """
    name = str(meeting.gather(folders.name)[0])
    if not _NAME.fullmatch(name):
        raise TransferError(f"rank 0 sent {name!r} as the name of its folder")
    joined = replace(folders, name=name)
    try:
        joined.scratch.mkdir()
        is_new = True
    except FileExistsError:
        is_new = False
    try:
        yield joined
        meeting.gather(None)
    finally:
        if is_new:
            DiskFolder(joined.scratch).remove()


@contextmanager
def scratch_in_store(folder: StoreFolder) -> Iterator[None]:
    """Test that a folder can be written and removed, and remove it at the end.

    Raises Unsupported before anything is measured, TransferError if something stays.
    """
    try:
        (folder.place / "probe").write_bytes(b"ckptool")
        folder.remove()
    except (NotFound, Denied) as error:
        message = f"{folder.place.parent}: cannot be written to: {error}"
        raise Unsupported(message, hint=error.hint) from None
    try:
        yield
    finally:
        folder.remove()
