"""The content of tensors, whatever way they are sharded: SHA-256 of the row-major bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.layout import tiles
from ckptool.engine.gather import Gatherer, raw
from ckptool.engine.sources import Bytes, Files, pieces
from ckptool.engine.threads import share_jobs


def digests(
    entries: Iterable[TensorEntry],
    start: Callable[[], Gatherer],
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of each tensor's elements in row-major order, by name.

    ``start`` makes the gatherer of a worker. Bounded memory: a tile a worker. The chunks
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
    source: Files,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of whole files of a source. Raises NotFound where one cannot be read."""
    found: dict[str, str] = {}

    def work(reader: Bytes, file: str) -> None:
        total = hashlib.sha256()
        for piece in pieces(reader, file, source.files[file], source.tile):
            total.update(piece)
            progress(len(piece))
        found[file] = total.hexdigest()

    share_jobs(iter(list(files)), workers, source.reader, work)
    return found


def _digest(entry: TensorEntry, gatherer: Gatherer, progress: Callable[[int], None]) -> str:
    total = hashlib.sha256()
    for tile in tiles(Box.whole(entry.shape), entry.source_dtype.itemsize, gatherer.tile):
        total.update(raw(gatherer.values(entry, tile)))
        progress(tile.volume * entry.source_dtype.itemsize)
    return total.hexdigest()
