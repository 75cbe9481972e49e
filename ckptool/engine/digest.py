"""The content of tensors, whatever way they are sharded: SHA-256 of the row-major bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.layout import tiles
from ckptool.engine.gather import Gatherer, raw
from ckptool.engine.threads import share_jobs

_TILE = 1 << 20


def digests(
    entries: Iterable[TensorEntry],
    root: str,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of each tensor's stored elements in row-major order, by name.

    Bounded memory: tiles of a MiB a worker. The chunks must tile each tensor exactly.
    """
    found: dict[str, str] = {}

    def work(gatherer: Gatherer, entry: TensorEntry) -> None:
        found[entry.name] = _digest(entry, gatherer, progress)

    share_jobs(iter(list(entries)), workers, lambda: Gatherer(root), work)
    return found


def _digest(entry: TensorEntry, gatherer: Gatherer, progress: Callable[[int], None]) -> str:
    total = hashlib.sha256()
    for tile in tiles(Box.whole(entry.shape), entry.source_dtype.itemsize, _TILE):
        values = gatherer.gathered(entry, tile)
        total.update(raw(values))
        progress(values.nbytes)
    return total.hexdigest()
