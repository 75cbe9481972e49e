"""The containers of an open checkpoint, opened when a box needs their contents."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint
from ckptool.core.catalog import Catalog, Chunk, TensorEntry
from ckptool.core.sharding.index import ChunkIndex

if TYPE_CHECKING:
    from ckptool.engine.read.tensors import FillRequest


class Containers:
    """The containers of a checkpoint opened so far, shared by all threads."""

    def __init__(self, opened: OpenedCheckpoint, catalog: Catalog) -> None:
        self._opened = opened
        self._catalog = catalog
        self._indexes: dict[str, ChunkIndex] = {}
        self._located: dict[int, Chunk] = {}
        self._lock = threading.Lock()

    def locate(self, requests: Sequence[FillRequest]) -> list[FillRequest]:
        """Return the requests with only the chunks that hold their boxes, at places to read."""
        chunk_lists = [self._chunks(target) for target in requests]
        with self._lock:
            self._open(
                {
                    (target.entry.name, id(chunk)): (target.entry, chunk)
                    for target, chunks in zip(requests, chunk_lists, strict=True)
                    for chunk in chunks
                    if id(chunk) not in self._located
                }.values()
            )
        entries = (
            replace(target.entry, chunks=tuple(self._located[id(chunk)] for chunk in chunks))
            for target, chunks in zip(requests, chunk_lists, strict=True)
        )
        return [w._replace(entry=entry) for w, entry in zip(requests, entries, strict=True)]

    def _chunks(self, request: FillRequest) -> list[Chunk]:
        index = self._indexes.get(request.entry.name)
        if index is None:
            index = self._indexes[request.entry.name] = ChunkIndex(request.entry)
        return [overlap.chunk for overlap in index.find(request.box)]

    def _open(self, pairs: Iterable[tuple[TensorEntry, Chunk]]) -> None:
        """Open the containers of chunks, but not those of their copies."""
        chunks: dict[str, list[Chunk]] = {}
        tensors: dict[str, TensorEntry] = {}
        for entry, chunk in pairs:
            chunks.setdefault(entry.name, []).append(chunk)
            tensors[entry.name] = entry
        if not tensors:
            return
        entries = {
            n: replace(e, chunks=tuple(replace(c, copies=()) for c in chunks[n]))
            for n, e in tensors.items()
        }
        located = self._opened.open_tensors(self._catalog.with_tensors(entries)).tensors
        for name in entries:
            for chunk, place in zip(chunks[name], located[name].chunks, strict=True):
                self._located[id(chunk)] = place
