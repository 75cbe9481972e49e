"""The folders that a benchmark uses, on disk or in a store, and what a save leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from ckptool.errors import NotFound, TransferError, Unsupported, UsageError
from ckptool.storage.clients.unfinished_uploads import abort_uploads
from ckptool.storage.retry import Denied
from ckptool.storage.url import WEB, Location, RemotePath

if TYPE_CHECKING:
    from ckptool.commands.bench.launch import Meeting

_SHARED_MEMORY = Path("/dev/shm")
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


def list_shared_memory() -> set[str]:
    """Return the names of this user's shared memory."""
    names = set()
    for name in list_folder(_SHARED_MEMORY):
        with suppress(OSError):
            if (_SHARED_MEMORY / name).lstat().st_uid == os.getuid():
                names.add(name)
    return names


def free_shared_memory() -> int:
    """Return the bytes that can still be put into shared memory."""
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0


def unused_shared_memory(before: Collection[str], doomed: Collection[int] = ()) -> list[Path]:
    """Return shared memory made since ``before`` that only the processes ``doomed`` have open."""
    paths = [_SHARED_MEMORY / name for name in sorted(list_shared_memory() - set(before))]
    if not paths:
        return []
    in_use: set[str] = set()
    for process in psutil.process_iter():
        if process.pid not in doomed:
            in_use |= _open_paths(process)
    return [path for path in paths if str(path) not in in_use]


def _open_paths(process: psutil.Process) -> set[str]:
    """Return the files that a process has open or mapped, as far as permitted."""
    with suppress(psutil.Error):
        return {file.path for file in [*process.open_files(), *process.memory_maps()]}
    return set()


class Folders(NamedTuple):
    """Where the ranks work, their TMPDIR, and the URL to save below if in a store."""

    scratch: str
    temporary: str
    store: str | None


@contextmanager
def scratch(out: Location) -> Iterator[Folders]:
    """Make the run's own folders, which are removed at the end."""
    parent = out if isinstance(out, Path) else None
    # sockets are among the temporary files, and their paths must be short
    work, temporary = (tempfile.mkdtemp(prefix="ckptool-", dir=place) for place in (parent, None))
    try:
        (Path(work) / "logs").mkdir()
        if isinstance(out, Path):
            yield Folders(work, temporary, None)
        else:
            with scratch_in_store(out / Path(work).name) as place:
                yield Folders(work, temporary, place.url)
    finally:
        for folder in (work, temporary):
            remove(Path(folder))


@contextmanager
def scratch_of_all(out: Location, meeting: Meeting) -> Iterator[Folders]:
    """Make rank 0's scratch folders, for every rank."""
    if not meeting.rank:
        with scratch(out) as folders:
            meeting.gather(folders)
            yield folders
            meeting.gather(None)
        return
    folders = Folders(*meeting.gather(None)[0])
    own = [folders.temporary] if folders.store is None else [folders.temporary, folders.scratch]
    for folder in own:  # each node has its own
        (Path(folder) / "logs").mkdir(parents=True, exist_ok=True)
    try:
        yield folders
        meeting.gather(None)
    finally:
        for folder in own:
            remove(Path(folder))


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
