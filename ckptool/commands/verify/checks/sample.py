"""Which data of a checkpoint is read: all, a sample of it, or one part's share."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Container, Place, TensorEntry
from ckptool.engine.check.spans import ByteSpan
from ckptool.engine.share import Share


class DataSample:
    """A ``share`` of the items and of the spans outside them, chosen by ``seed``; or all.

    Checks that concern no particular data are done by readers of all data, and by the first part.
    A sample ``leaves_none`` if all that it does not read is read by other parts.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.is_all = self.checks_whole = self.leaves_none = share >= 1
        self._share = share
        self._chance = random.Random(seed)
        self._choices: dict[Container, bool] = {}

    def takes(self, item: Container) -> bool:
        """Return whether an item is in the sample; the answer never changes."""
        if self.is_all:
            return True
        if item not in self._choices:
            self._choices[item] = self._chance.random() < self._share
        return self._choices[item]

    def of(self, spans: list[ByteSpan], chosen: Collection[str]) -> list[ByteSpan]:
        """Return the spans to read: all in files of ``chosen`` items, some of the others."""
        if self.is_all:
            return spans
        return [s for s in spans if s.file in chosen or self._chance.random() < self._share]

    def narrow(self, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return the tensors without the chunks that others read; here all."""
        return tensors

    def whole_files(self, files: Mapping[str, int]) -> dict[str, int]:
        """Return the files that are read here completely."""
        return {**files} if self.is_all else {}


class DataPart(DataSample):
    """The items, and the files without items, of one share of all, balanced by bytes."""

    def __init__(self, share: Share, catalog: Catalog | None, sizes: Mapping[str, int]) -> None:
        super().__init__(0, 0)
        self.checks_whole, self.leaves_none = share.position == 0, True
        archives = catalog.archives if catalog else ()
        items = {(item.file, item.offset): item.nbytes for item in archives}
        self._inner = {file for file, _ in items}
        files = {(file, 0): nbytes for file, nbytes in sizes.items() if file not in self._inner}
        units = items | files
        ordered = sorted(units)
        share_units = {ordered[at] for at in share.takes([units[unit] for unit in ordered])}
        self._items = share_units & items.keys()
        self._files = {file for file, _ in share_units & files.keys()}

    def takes(self, item: Container) -> bool:
        """Return whether an item belongs to this part."""
        return (item.file, item.offset) in self._items or item.file in self._files

    def of(self, spans: list[ByteSpan], chosen: Collection[str]) -> list[ByteSpan]:
        """Return the spans of this part; in files of ``chosen`` items only its items have some."""
        return [span for span in spans if span.file in chosen or span.file in self._files]

    def narrow(self, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return tensors without the chunks that others read."""
        return {name: self._narrowed(entry) for name, entry in tensors.items()}

    def _narrowed(self, entry: TensorEntry) -> TensorEntry:
        chunks = tuple(chunk for chunk in entry.chunks if any(map(self._holds, chunk.places)))
        return entry if len(chunks) == len(entry.chunks) else replace(entry, chunks=chunks)

    def _holds(self, at: Place) -> bool:
        return at.file in self._inner or at.file in self._files

    def whole_files(self, files: Mapping[str, int]) -> dict[str, int]:
        """Return the files that are read here completely."""
        return {file: nbytes for file, nbytes in files.items() if file in self._files}
