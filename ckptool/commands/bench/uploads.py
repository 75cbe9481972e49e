"""A folder of a store to save to: tried first, measured, and removed with all that was begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptool.engine.patience import Denied
from ckptool.engine.remote_path import Location, RemotePath
from ckptool.engine.web import SCHEMES
from ckptool.errors import CannotDo, NotFound, TransferError, UsageError

_PIECE = 16 << 20


def require_savable(out: RemotePath, *, abort: bool) -> None:
    """CannotDo for a store that ranks cannot write to or share, UsageError for an ``abort``."""
    if abort:
        raise UsageError(
            "--abort looks for what is left on disk; --out is a URL", hint="--out with a folder"
        )
    if out.store.scheme in SCHEMES:
        raise CannotDo(f"{out}: cannot be written to: the web is only read")
    if out.store.scheme == "memory":
        raise CannotDo(f"{out}: every rank is a process, and has a memory:// of its own")


@contextmanager
def emptied(place: RemotePath) -> Iterator[RemotePath]:
    """A folder that can be written and removed, and is removed at the end.

    Raises CannotDo before anything is measured, TransferError where something stays.
    """
    try:
        (place / "probe").write_bytes(b"ckptool")
        remove_uploaded(place)
    except NotFound as error:
        message = f"{place.parent}: cannot be written to: {error.message}"
        raise CannotDo(message, hint=error.hint) from None
    try:
        yield place
    finally:
        remove_uploaded(place)


def remove_uploaded(place: RemotePath) -> None:
    """Remove a folder, and the parts of files that were not finished; TransferError if it stays."""
    store, inside = place.store, f"{place.key}/"
    store.fs.invalidate_cache()
    with suppress(NotFound):
        store.ask(str(place), lambda: store.fs.rm(place.key, recursive=True))
    store.abort_uploads(place.key, lambda key: key.startswith(inside))
    if listed(place):
        raise TransferError(
            f"{place}: cannot be removed", hint="remove it by the store's own tools"
        )


def listed(place: RemotePath) -> dict[str, int]:
    """The bytes of every file below, as the store lists them now."""
    try:
        found = place.store.find(place.key, str(place))
    except Denied:
        raise
    except NotFound:
        return {}
    return {name: info.nbytes for name, info in found.items()}


def clients(place: RemotePath) -> tuple[str, ...]:
    """The packages that speak with the store: fsspec, and the one that knows it."""
    return tuple(dict.fromkeys(("fsspec", type(place.store.fs).__module__.partition(".")[0])))


def named(place: Location) -> Path | str:
    """A place as strategies take it: a path, or a URL."""
    return place if isinstance(place, Path) else place.url


def upload(data: memoryview, file: RemotePath) -> None:
    """Write a file as fsspec does by itself, in order, until the store has it."""
    with file.store.fs.open(file.key, "wb") as stream:
        for start in range(0, len(data), _PIECE):
            stream.write(data[start : start + _PIECE])
