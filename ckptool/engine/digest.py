"""The content of tensors, whatever way they are sharded: SHA-256 of the row-major bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.layout import tiles
from ckptool.engine.gather import Gatherer, raw
from ckptool.engine.sources import unreadable
from ckptool.engine.threads import share_jobs

_TILE = 1 << 20


def digests(
    entries: Iterable[TensorEntry],
    start: Callable[[], Gatherer],
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of each tensor's stored elements in row-major order, by name.

    ``start`` makes the gatherer of a worker. Bounded memory: tiles of a MiB a worker. The chunks
    must tile each tensor exactly; the largest are begun first.
    """
    found: dict[str, str] = {}

    def work(gatherer: Gatherer, entry: TensorEntry) -> None:
        found[entry.name] = _digest(entry, gatherer, progress)

    largest_first = sorted(entries, key=lambda entry: -entry.nbytes)
    share_jobs(iter(largest_first), workers, start, work)
    return found


def file_digests(
    files: Iterable[str],
    root: str,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of whole files below ``root``. Raises NotFound where one cannot be read."""
    found: dict[str, str] = {}

    def work(buffer: _Buffer, file: str) -> None:
        found[file] = _file_digest(os.path.join(root, file), file, buffer.data, progress)

    share_jobs(iter(list(files)), workers, _Buffer, work)
    return found


class _Buffer:
    """What one thread reads files into."""

    def __init__(self) -> None:
        self.data = memoryview(bytearray(_TILE))

    def close(self) -> None:
        """Nothing is held but memory."""


def _file_digest(path: str, file: str, buffer: memoryview, progress: Callable[[int], None]) -> str:
    total = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total.update(buffer[:count])
                progress(count)
    except OSError as error:
        raise unreadable(file, error) from None
    return total.hexdigest()


def _digest(entry: TensorEntry, gatherer: Gatherer, progress: Callable[[int], None]) -> str:
    total = hashlib.sha256()
    for tile in tiles(Box.whole(entry.shape), entry.source_dtype.itemsize, _TILE):
        values = gatherer.gathered(entry, tile)
        total.update(raw(values))
        progress(values.nbytes)
    return total.hexdigest()
