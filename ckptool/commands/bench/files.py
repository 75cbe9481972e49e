"""The folders that a benchmark uses, on disk or in a store, and what a save leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckptool.errors import Denied, NotFound, TransferError, Unsupported, UsageError
from ckptool.storage.clients.unfinished_uploads import abort_uploads
from ckptool.storage.url import WEB, Location, RemotePath, location

if TYPE_CHECKING:
    from ckptool.commands.bench.meeting import Meeting

_PREFIX = "ckptool-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
"""The names that ``tempfile.mkdtemp`` makes (Python 3.11 to 3.14)."""
_PAUSES = (0.02, 0.1, 0.5, 1.0, 0.0)
_PIECE = 16 << 20


def file_sizes(folder: Location) -> dict[str, int]:
    """Return the bytes of every file below a folder, by its name relative to it."""
    if not isinstance(folder, Path):
        return list_uploaded(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def has_bytes(folder: Path) -> bool:
    """Whether any file below the folder has a byte in it."""
    with suppress(OSError):
        return any(file_sizes(folder).values())
    return False


def list_folder(folder: Path) -> set[str]:
    """Return the names directly in a folder; none if it does not exist."""
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def make_durable(folder: Location) -> None:
    """Fsync every file and folder below, the folder itself, and its parent's entry for it.

    A store has nothing to sync: a file that is there is safe.
    """
    if not isinstance(folder, Path):
        return
    for path in (*folder.rglob("*"), folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Location) -> None:
    """Remove a file or a folder with everything in it, if any, even while it is being filled."""
    if not isinstance(path, Path):
        remove_uploaded(path)
    elif path.is_dir() and not path.is_symlink():
        for pause in _PAUSES:
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                return
            time.sleep(pause)
    else:
        with suppress(OSError):
            path.unlink()


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
    def stored(self) -> Location | None:
        return None if self.store is None else location(self.store) / self.name


@contextmanager
def scratch(out: Location, *, leads: bool = True) -> Iterator[Folders]:
    """Make the run's own folders, which are removed at the end.

    A process that does not lead makes only what is its own; ``join_scratch`` has the rest.
    """
    temporary = tempfile.mkdtemp(prefix=_PREFIX)  # with sockets, whose paths must be short
    made: list[Location] = [Path(temporary)]
    parent = str(out) if isinstance(out, Path) else tempfile.gettempdir()
    store = None if isinstance(out, Path) else out.url
    try:
        (Path(temporary) / "logs").mkdir()
        if not leads:
            yield Folders(temporary, parent, "", store)
            return
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        made.append(work)
        if isinstance(out, Path):
            yield Folders(temporary, parent, work.name)
        else:
            with scratch_in_store(out / work.name):
                yield Folders(temporary, parent, work.name, store)
    finally:
        for folder in made:
            remove(folder)


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
        made = True
    except FileExistsError:
        made = False
    try:
        yield joined
        meeting.gather(None)
    finally:
        if made:
            remove(joined.scratch)


def require_savable(out: RemotePath, *, abort: bool) -> None:
    """Check a store: Unsupported if ranks cannot write to or share it, UsageError for ``abort``."""
    if abort:
        raise UsageError(
            "--abort looks for what is left on disk; --out is a URL",
            hint="use --out with a local folder",
        )
    if out.store.scheme in WEB:
        raise Unsupported(f"{out}: cannot be written to: web servers are read-only")
    if out.store.scheme == "memory":
        raise Unsupported(f"{out}: each rank is a process with its own memory://")


@contextmanager
def scratch_in_store(place: RemotePath) -> Iterator[RemotePath]:
    """Test that a folder can be written and removed, and remove it at the end.

    Raises Unsupported before anything is measured, TransferError if something stays.
    """
    try:
        (place / "probe").write_bytes(b"ckptool")
        remove_uploaded(place)
    except (NotFound, Denied) as error:
        message = f"{place.parent}: cannot be written to: {error}"
        raise Unsupported(message, hint=error.hint) from None
    try:
        yield place
    finally:
        remove_uploaded(place)


def remove_uploaded(place: RemotePath) -> None:
    """Remove a folder, and the parts of unfinished files; TransferError if something stays."""
    store, inside = place.store, f"{place.key}/"
    store.fs.invalidate_cache()
    with suppress(NotFound, Denied):  # what stays is searched for below
        store.ask(str(place), lambda: store.fs.rm(place.key, recursive=True))
    abort_uploads(store, inside, lambda key: True)
    if list_uploaded(place):
        raise TransferError(
            f"{place}: cannot be removed", hint="remove it with the store's own tools"
        )


def list_uploaded(place: RemotePath) -> dict[str, int]:
    """Return the size of every file below, as the store lists them now."""
    try:
        return {n: file.nbytes for n, file in place.store.find(place.key, str(place)).items()}
    except NotFound:
        return {}


def store_clients(place: RemotePath) -> tuple[str, ...]:
    """Return the packages that access the store: fsspec, and the one for its scheme."""
    return tuple(dict.fromkeys(("fsspec", type(place.store.fs).__module__.partition(".")[0])))


def path_or_url(place: Location) -> Path | str:
    """Return a place in the form for strategies."""
    return place if isinstance(place, Path) else place.url


def write_raw(data: memoryview, file: Location) -> None:
    """Write a file sequentially, by Python or fsspec alone, until the disk or the store has it."""
    with (
        file.open("wb") if isinstance(file, Path) else file.store.fs.open(file.key, "wb") as stream
    ):
        for start in range(0, len(data), _PIECE):
            stream.write(data[start : start + _PIECE])
        if isinstance(file, Path):
            stream.flush()
            os.fsync(stream.fileno())
