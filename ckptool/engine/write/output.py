"""The files of an output, which several threads write: each has its own descriptors and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptool.core.layout import FileLayout, Literal, Part
from ckptool.core.sharding.groups import Tile
from ckptool.engine.checksum import crc32
from ckptool.errors import TransferError
from ckptool.storage.disk import open_unfollowed

WRITE = 1 << 20
"""Bytes of one write, while they are in the processor's cache."""
SMALL = 64 << 10
"""Bytes of a part up to which a copy costs less than a write of its own."""
_RUN = 256 << 10
"""Bytes of adjoining small parts that are written at once."""
_MOST_RUNS = 16
"""Files of which a thread keeps bytes that are not written yet."""
_MOST_OPEN = 32
"""File descriptors of one thread."""


class WrittenPart(NamedTuple):
    """A part of a file, by its position, or a tile of one: where it is, and its CRC-32."""

    part: int
    offset: int
    nbytes: int
    crc: int


class WrittenRun(NamedTuple):
    """What was written to a file of the layout at once: ``tiles``, and ``nbytes`` of literals."""

    file: int
    parts: Sequence[WrittenPart]
    tiles: int
    nbytes: int = 0


class _Run:
    """Adjoining small parts of a file that are not written yet, with the literals between them."""

    def __init__(self, file: int, parts: Sequence[Part]) -> None:
        self.file = file
        self.start = 0
        self.data = bytearray()
        self.tiles = 0
        self.literals = 0
        self.written: list[WrittenPart] = []
        self._parts = parts
        self._next = 0
        self._crcs: dict[int, int] = {}

    def add(self, tile: Tile, data: memoryview, crc: int) -> bool:
        """Append a part; return False if it does not adjoin what was added before."""
        if not self.data:
            self.start, self._next = tile.offset, tile.part
        elif not self._go_on_to(tile.part) or self.start + len(self.data) != tile.offset:
            return False
        self._append(data, crc)
        self.tiles += 1
        return True

    def _go_on_to(self, part: int) -> bool:
        """Append the parts before one, if they are literals whose checksums are known."""
        while self._next < part:
            literal = self._parts[self._next]
            if not isinstance(literal, Literal):
                if literal.nbytes:
                    return False
                self._crcs[self._next] = 0
                self._next += 1
                continue
            if literal.nbytes > SMALL or any(p.part not in self._crcs for p in literal.patches):
                return False
            data = apply_patches(literal, self._crcs.__getitem__)
            self.literals += len(data)
            self._append(memoryview(data), crc32(data))
        return self._next == part

    def _append(self, data: memoryview, crc: int) -> None:
        self.written.append(WrittenPart(self._next, self.start + len(self.data), len(data), crc))
        self._crcs[self._next] = crc
        self._next += 1
        self.data += data


class OutputFiles:
    """The files below a folder. ``written`` is called with what is written of small parts.

    Their bytes are kept until there are enough of them, or others follow; nothing is noted as
    written before it is.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[FileLayout] = (),
        written: Callable[[WrittenRun], None] = lambda run: None,
    ) -> None:
        self._folder = folder
        self._files = files
        self._written = written
        self._local = threading.local()

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Write all bytes at an offset of a file; TransferError if that fails."""
        write_at(self._descriptor(path), path, offset, data)

    def add(self, tile: Tile, parts: Sequence[Part], data: memoryview, crc: int) -> None:
        """Write a small part of a file of ``parts`` soon; TransferError if writing fails."""
        runs: dict[int, _Run] | None = getattr(self._local, "runs", None)
        if runs is None:
            runs = self._local.runs = {}
        run = runs.get(tile.file)
        if run is None or not run.add(tile, data, crc):
            if run is not None or len(runs) >= _MOST_RUNS:
                self._flush(runs.pop(tile.file if run is not None else next(iter(runs))))
            run = runs[tile.file] = _Run(tile.file, parts)
            run.add(tile, data, crc)
        if len(run.data) >= _RUN:
            self._flush(runs.pop(tile.file))

    def close(self) -> None:
        """Write what the calling thread keeps, and close its descriptors."""
        try:
            runs: dict[int, _Run] = getattr(self._local, "runs", {})
            while runs:
                self._flush(runs.popitem()[1])
        finally:
            _close_all(getattr(self._local, "descriptors", {}))

    def _flush(self, run: _Run) -> None:
        self.write(self._files[run.file].path, run.start, memoryview(run.data))
        self._written(WrittenRun(run.file, run.written, run.tiles, run.literals))

    def _descriptor(self, path: str) -> int:
        descriptors: dict[str, int] | None = getattr(self._local, "descriptors", None)
        if descriptors is None:
            descriptors = self._local.descriptors = {}
        if path not in descriptors:
            if len(descriptors) >= _MOST_OPEN:
                _close_all(descriptors)
            descriptors[path] = open_unfollowed(Path(f"{self._folder}/{path}"), os.O_WRONLY)
        return descriptors[path]


def apply_patches(literal: Literal, part_crc: Callable[[int], int]) -> bytes:
    """Return a literal with its patches; ``part_crc`` is the CRC-32 of one of the file's parts."""
    if not literal.patches:
        return literal.data
    data = bytearray(literal.data)
    for patch in literal.patches:
        data[patch.at : patch.at + 4] = part_crc(patch.part).to_bytes(4, "little")
    return bytes(data)


def write_at(descriptor: int, path: str, offset: int, data: memoryview) -> None:
    """Write all bytes at an offset of the file at ``path``; TransferError if that fails."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(descriptor, data[done : done + WRITE], offset + done)
        except OSError as error:
            raise TransferError(f"{path}: {error.strerror} at byte {offset + done:,}") from None


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
