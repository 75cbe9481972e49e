"""One item of a DCP folder, opened: now, or when its elements are read.

A store answers late even to small requests. There an item is opened from the bytes that are fetched
for its elements anyway; the place of these is guessed from a similar item, only to decide what to
fetch. Whoever has a share of a checkpoint on a disk opens only the items in it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.box import Box, contiguous, row_major_strides
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Container,
    Extent,
    Place,
    StridedPart,
    TensorEntry,
)
from ckptool.core.chunks import ChunkTable, LateChunks
from ckptool.core.dtype import DType
from ckptool.core.views import part_of_place
from ckptool.errors import UNREAD, CkptoolError, Damaged, Hostile, Unsupported
from ckptool.serialization.archive.read import TorchFile, is_zip, read_torch_zip
from ckptool.serialization.archive.tensors import (
    is_tensor_record,
    locate_tensor,
    read_outer,
    read_tensor,
)
from ckptool.serialization.source import NearReads, Source, edge_spans, expect_items
from ckptool.serialization.state_dict.values import type_name
from ckptool.serialization.zip import item_region

_EDGE = 1 << 16
_OVERHEAD = 1 << 20
_ALIGNMENT = 64
"""Bytes to which torch.save aligns records (1.6 to 2.15): those beside the data depend on it."""

ItemKind = tuple[int, int]
"""Bytes of an item beside its elements, and how far these go beyond the alignment."""


class NoPlainTensor(Unsupported):
    """An item contains a tensor of another kind; the metadata has only its type and shape."""


class Item(Struct, frozen=True):
    """An item, the tensor and the box that it is of, and its metadata."""

    at: Container
    tensor: str
    box: Box
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, entry: TensorEntry, box: Box, at: Container) -> Item:
        """Return the item that contains a chunk of a tensor."""
        shape = at.part.shape if at.part else box.shape
        return cls(at, entry.name, box, entry.source_dtype, shape)

    @property
    def what(self) -> str:
        """Its name in errors."""
        return f"{self.tensor} {self.box}"

    @property
    def data_nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> ItemKind:
        """The kind of items whose elements begin at the same place, for one writer."""
        return self.at.nbytes - self.data_nbytes, self.data_nbytes % _ALIGNMENT


def closed_items(entry: TensorEntry) -> Iterator[Item]:
    """Yield the unopened items of a tensor, those of copies included."""
    for chunk in entry.chunks:
        for at in chunk.places:
            if isinstance(at, Container) and at.opening is None:
                yield Item.of(entry, chunk.box, at)


def open_item(source: Source, item: Container, what: str, limit: int, edge: int) -> TorchFile:
    """Open the archive of one item, decoded as ``item_region`` does."""
    region = item_region(NearReads(source), item, what, limit, edge)
    head = region.read(0, min(region.nbytes, 9))
    if not item.transforms and not is_zip(head):
        kind = (
            " (safetensors data, which torch itself cannot read back)" if head[8:] == b"{" else ""
        )
        message = f"{what}: no torch.save archive at byte {item.offset:,} of {item.file}{kind}"
        raise Damaged(message, "item-mismatch", file=item.file)
    opened = read_torch_zip(region)
    return replace(opened, packed=(item, region.nbytes)) if item.transforms else opened


def locate_item(source: Source, item: Item) -> Place:
    """Return where all elements of an item are.

    Raises Damaged if it contradicts the metadata, NoPlainTensor if it may be another kind.
    """
    at, what, dtype, shape = item.at, item.what, item.dtype, item.shape
    opened = open_item(source, at, what, item.data_nbytes * 2 + _OVERHEAD, _EDGE)
    tensor = read_tensor(opened.value)
    if tensor is None:
        raise _no_tensor(opened.value, f"{what}: its item in {at.file}", at, (dtype, shape))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        message = f"{what}: its item at byte {at.offset:,} of {at.file} is {tensor.dtype}"
        message += f" {list(tensor.shape)}, the metadata says {dtype} {list(shape)}"
        raise Damaged(message, "item-mismatch", file=at.file)
    return locate_tensor(tensor, opened)


def part_of_item(item: Item, place: Place, part: StridedPart, shape: tuple[int, ...]) -> Place:
    """Return where a part, a chunk of ``shape``, is in an item with elements at a place."""
    try:
        return part_of_place(
            place, part.shape, shape, part.start, part.strides, item.dtype.itemsize
        )
    except ValueError as error:
        message = f"{item.what}: its item in {item.at.file} is {error}"
        raise Damaged(message, "item-mismatch", file=item.at.file) from None


def _no_tensor(
    value: Any, what: str, item: Container, expected: tuple[DType, tuple[int, ...]]
) -> CkptoolError:
    """Return why an item is not a plain tensor of the type and shape that are ``expected``."""
    kind = read_outer(value) if is_tensor_record(value) else expected
    if not is_tensor_record(value) or kind not in (None, expected):
        message = f"{what} holds {type_name(value)}, not a plain tensor"
        return Damaged(message, "item-mismatch", file=item.file)
    message = f"{what} holds a tensor of an unsupported kind ({type_name(value)})"
    return NoPlainTensor(message, UNREAD, file=item.file)


def _late_item(entry: TensorEntry, chunk: Chunk) -> Item | None:
    """Return the item that a chunk is in; None if it is not opened late.

    Copies are compared by checksum, and what is transformed is read whole.
    """
    at = chunk.at
    if chunk.copies or not isinstance(at, Container) or at.transforms:
        return None
    return Item.of(entry, chunk.box, at)


def _kinds_of(entry: TensorEntry) -> list[ItemKind | None]:
    """Return the kind of the item that each chunk is in, None for one that is not opened late."""
    chunks = entry.chunks
    if type(chunks) is ChunkTable:
        nbytes = chunks.boxes.volumes * entry.source_dtype.itemsize
        rests, places = (chunks.items.lengths - nbytes).tolist(), (nbytes % _ALIGNMENT).tolist()
        return list(zip(rests, places, strict=True))
    items = (_late_item(entry, chunk) for chunk in chunks)
    return [None if item is None else item.kind for item in items]


def plain_start(item: Item, place: Place) -> int | None:
    """Return the byte of an item where its elements begin, None unless they are plain.

    They are plain if they are a whole record, unchanged and in order.
    """
    if not isinstance(place, Extent) or place.record is None or place.ops:
        return None
    is_all = (place.record.offset, place.record.nbytes) == (place.offset, item.data_nbytes)
    is_plain = is_all and contiguous(place.strides, item.shape, item.dtype.itemsize)
    return place.offset - item.at.offset if is_plain else None


def _find_start(source: Source, item: Item) -> int | None:
    """Return where the elements of an item begin, None unless they are a plain tensor's.

    Problems are reported later, together.
    """
    try:
        return plain_start(item, locate_item(source, item))
    except CkptoolError:
        return None


class Openings:
    """Defers the opening of items whose elements likely begin where those of a similar one do.

    That one is opened. ``locate`` opens all of the catalog's items and raises their problems.
    """

    def __init__(self, source: Source, catalog: Catalog, locate: Callable[[], object]) -> None:
        self.source = source
        self._catalog = catalog
        self._locate = locate
        self._lock = threading.Lock()
        self._error: CkptoolError | None = None
        counts: Counter[ItemKind | None] = Counter()
        first: dict[ItemKind | None, tuple[TensorEntry, int]] = {}
        for entry in catalog.tensors.values():
            kinds = _kinds_of(entry)
            counts.update(kinds)
            for kind in set(kinds) - first.keys():
                first[kind] = entry, kinds.index(kind)
        several = [first[kind] for kind, count in counts.items() if count > 1]
        late_items = (_late_item(entry, entry.chunks[at]) for entry, at in several)
        models = [item for item in late_items if item is not None]
        expect_items(source, (item.at for item in models))
        starts = [(item.kind, _find_start(source, item)) for item in models]
        self._starts = {kind: start for kind, start in starts if start is not None}

    def deferred(self) -> Catalog:
        """Return the catalog with an opening for each item that can be opened later."""
        tensors = dict(self._catalog.tensors)
        for name, entry in tensors.items():
            chunks, defer = entry.chunks, partial(self._defer, entry)
            if type(chunks) is ChunkTable and self._starts.keys() >= {*_kinds_of(entry)}:
                tensors[name] = replace(entry, chunks=LateChunks(chunks, defer))
            else:
                tensors[name] = replace(entry, chunks=tuple(map(defer, chunks)))
        return self._catalog.with_tensors(tensors)

    def _defer(self, entry: TensorEntry, chunk: Chunk) -> Chunk:
        item = _late_item(entry, chunk)
        start = self._starts.get(item.kind) if item is not None else None
        if item is None or start is None:
            return chunk
        at = item.at
        part = at.part or StridedPart(item.shape, 0, row_major_strides(item.shape, 1))
        opening = ItemOpening(self, item, at.offset + start)
        return replace(chunk, at=replace(at, part=part, opening=opening))

    def explain(self) -> None:
        """Raise the problems of any item; threads that ask at once get the same ones."""
        with self._lock:
            if self._error is None:
                try:
                    self._locate()
                except CkptoolError as error:
                    self._error = error
            if self._error is not None:
                raise self._error


class ItemOpening(Struct, eq=False):
    """Opens an item when its elements are first read; all its readers wait for that."""

    openings: Openings
    item: Item
    start: int
    _place: Place | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def edges(self) -> tuple[tuple[str, int, int], ...]:
        """What is read to open it: file, offset and bytes."""
        at = self.item.at
        return () if self._place else edge_spans(at.file, at.offset, at.nbytes)

    def place(self, at: Container, shape: tuple[int, ...]) -> Place:
        """Return where the elements of a chunk of ``shape``, a part of the item, are."""
        with self._lock:
            if self._place is None:
                self._place = self._locate()
        return (
            self._place if at.part is None else part_of_item(self.item, self._place, at.part, shape)
        )

    def _locate(self) -> Place:
        try:
            return locate_item(self.openings.source, self.item)
        except (Damaged, Hostile, Unsupported):
            self.openings.explain()
            raise
