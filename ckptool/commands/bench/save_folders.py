"""The folders that are saved into, on a disk or in a store, and what a save leaves there."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, ClassVar

import psutil
from msgspec import Struct

from ckptool.errors import Denied, NotFound, TransferError, Unsupported, UsageError
from ckptool.storage.clients.fsspec_client import open_file_system
from ckptool.storage.clients.schemes import WEB
from ckptool.storage.place import full_name, on_disk
from ckptool.storage.url import Location, RemotePath

_PAUSES = (0.02, 0.1, 0.5, 1.0, 0.0)
_PIECE = 16 << 20


class DiskFolder(Struct, frozen=True):
    """A folder, or a file in it, on a disk; each machine of a job may have its own."""

    disk: Path

    clients: ClassVar[tuple[str, ...]] = ()

    def __truediv__(self, name: str) -> DiskFolder:
        return DiskFolder(self.disk / name)

    @property
    def target(self) -> Path:
        """The folder as strategies get it."""
        return self.disk

    @property
    def filesystem(self) -> str:
        """The type of the file system that the folder lies on."""
        path = self.disk.resolve()
        mounts = psutil.disk_partitions(all=True)
        around = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
        innermost = max(around, key=lambda mount: len(mount.mountpoint), default=None)
        return innermost.fstype if innermost else "unknown"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file below, by its name relative to the folder."""
        files = sorted(path for path in self.disk.rglob("*") if path.is_file())
        return {str(file.relative_to(self.disk)): file.stat().st_size for file in files}

    def make_durable(self) -> None:
        """Fsync every file and folder below, the folder itself, and its parent's entry for it."""
        for path in (*self.disk.rglob("*"), self.disk, self.disk.parent):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write(self, data: memoryview) -> None:
        """Write a file sequentially, by Python alone, until the disk has it."""
        with self.disk.open("wb") as stream:
            _write_pieces(stream, data)
            stream.flush()
            os.fsync(stream.fileno())

    def remove(self) -> None:
        """Remove it with everything in it, if it is there, even while it is being filled."""
        if not self.disk.is_dir() or self.disk.is_symlink():
            with suppress(OSError):
                self.disk.unlink()
            return
        for pause in _PAUSES:
            shutil.rmtree(self.disk, ignore_errors=True)
            if not self.disk.exists():
                return
            time.sleep(pause)


class StoreFolder(Struct, frozen=True):
    """A folder, or a file in it, in a store, which all ranks share."""

    place: RemotePath

    disk: ClassVar[None] = None

    def __truediv__(self, name: str) -> StoreFolder:
        return StoreFolder(self.place / name)

    @property
    def target(self) -> str:
        """The folder as strategies get it."""
        return self.place.url

    @property
    def filesystem(self) -> str:
        """The scheme of the store."""
        return f"{self.place.store.scheme}://"

    @property
    def clients(self) -> tuple[str, ...]:
        """The packages by which torch accesses the store: fsspec, and the one for its scheme.

        Raises Unsupported if that is missing.
        """
        package = type(open_file_system(self.place.url, {})).__module__.partition(".")[0]
        return tuple(dict.fromkeys(("fsspec", package)))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file below, as the store lists them now."""
        try:
            files = self.place.store.find(self.place.key, str(self.place))
        except NotFound:
            return {}
        return {name: file.nbytes for name, file in files.items()}

    def make_durable(self) -> None:
        """Do nothing: what is in a store is safe."""

    def write(self, data: memoryview) -> None:
        """Write a file sequentially, by fsspec alone, until the store has it."""
        fs = open_file_system(self.place.url, {})
        with fs.open(fs._strip_protocol(self.place.url), "wb") as stream:
            _write_pieces(stream, data)

    def remove(self) -> None:
        """Remove all that the store lists below it; TransferError if something stays."""
        with suppress(NotFound, Denied):  # what stays is searched for below
            keys = [(self.place / name).key for name in self.sizes()]
            self.place.store.remove(keys, str(self.place))
        if self.sizes():
            raise TransferError(
                f"{self.place}: cannot be removed", hint="remove it with the store's own tools"
            )


SaveFolder = DiskFolder | StoreFolder


def save_folder(out: Location, *, abort: bool) -> SaveFolder:
    """Return the folder of ``--out``.

    Raises Unsupported if ranks cannot write to or share a store, UsageError for ``abort`` there.
    """
    disk = on_disk(out)
    if disk is not None:
        return DiskFolder(disk)
    if abort:
        raise UsageError(
            "--abort looks for what is left on disk; --out is a URL",
            hint="use --out with a local folder",
        )
    place = RemotePath.parse(full_name(out))
    if place.store.scheme in WEB:
        raise Unsupported(f"{out}: cannot be written to: web servers are read-only")
    if place.store.scheme == "memory":
        raise Unsupported(f"{out}: each rank is a process with its own memory://")
    return StoreFolder(place)


def _write_pieces(stream: BinaryIO, data: memoryview) -> None:
    for start in range(0, len(data), _PIECE):
        stream.write(data[start : start + _PIECE])
