"""Where the chunks of an open checkpoint lie: containers are opened when a box needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptool.commands.open import Opened
from ckptool.core.catalog import Catalog, Chunk, TensorEntry
from ckptool.core.plan import ChunkIndex
from ckptool.errors import CannotDo

if TYPE_CHECKING:
    from ckptool.engine.boxes import Wanted


class Places:
    """What was opened so far of a checkpoint's containers, for all threads alike."""

    def __init__(self, opened: Opened, catalog: Catalog) -> None:
        self._opened = opened
        self._catalog = catalog
        self._indexes: dict[str, ChunkIndex] = {}
        self._found: dict[int, Chunk] = {}
        self._lock = threading.Lock()

    def located(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """The same with the chunks alone that hold the boxes, each in a place that can be read."""
        needed = [self._chunks(one) for one in wanted]
        with self._lock:
            self._locate(
                {
                    (one.entry.name, id(chunk)): (one.entry, chunk)
                    for one, chunks in zip(wanted, needed, strict=True)
                    for chunk in chunks
                    if id(chunk) not in self._found
                }.values()
            )
        return [
            one._replace(entry=replace(one.entry, chunks=tuple(self._found[id(c)] for c in chunks)))
            for one, chunks in zip(wanted, needed, strict=True)
        ]

    def _chunks(self, wanted: Wanted) -> list[Chunk]:
        index = self._indexes.get(wanted.entry.name)
        if index is None:
            index = self._indexes[wanted.entry.name] = ChunkIndex(wanted.entry)
        return [chunk for chunk, _ in index.find(wanted.box)]

    def _locate(self, closed: Iterable[tuple[TensorEntry, Chunk]]) -> None:
        """Open the containers of chunks, by themselves and not those of their copies."""
        chunks: dict[str, list[Chunk]] = {}
        tensors: dict[str, TensorEntry] = {}
        for entry, chunk in closed:
            chunks.setdefault(entry.name, []).append(chunk)
            tensors[entry.name] = entry
        if not tensors:
            return
        alone = {
            n: replace(e, chunks=tuple(replace(c, copies=()) for c in chunks[n]))
            for n, e in tensors.items()
        }
        located = self._opened.located(self._catalog.with_tensors(alone)).tensors
        for name in alone:
            if name not in located:
                raise CannotDo(
                    f"{name}: a tensor subclass that wraps others, no plain tensor",
                    hint="convert gives the tensors in it names of their own",
                )
            for chunk, found in zip(chunks[name], located[name].chunks, strict=True):
                self._found[id(chunk)] = found
