"""The items of a DCP folder, opened: each is a torch.save archive of one chunk or one value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Extent,
    Item,
    Packed,
    Path,
    Place,
    TensorEntry,
    places,
)
from ckptool.core.view import part_of_place
from ckptool.errors import UNCODED, CkptoolError, Damaged, Problem, coded, damaged
from ckptool.formats._archives import item_region
from ckptool.formats._assemble import assemble
from ckptool.formats._dcp_collect import DAMAGE_HINT
from ckptool.formats._leaves import Assembled, Leaf, PlainLeaf, read_leaves
from ckptool.formats._storage import place_of, plain_tensor
from ckptool.formats._torch_file import TorchFile, is_zip, read_torch_zip
from ckptool.formats._values import type_name
from ckptool.formats.base import Source, expect_edges

_LARGEST_VALUE = 1 << 26
_EDGE = 1 << 16
_OVERHEAD = 1 << 20


@dataclass(frozen=True, slots=True)
class _Opened:
    """The torch.save archive of one item; ``size`` is that of the decoded item in bytes."""

    file: TorchFile
    item: Item
    size: int

    def place(self, inner: Place) -> Place:
        """Where a tensor of the archive lies, seen from the folder."""
        if not self.item.transforms:
            return inner
        if not isinstance(inner, Extent):
            raise Damaged(f"{self.item.file}: a compressed record inside a compressed item")
        item = self.item
        return Packed(
            item.file, item.offset, item.nbytes, "zstd", self.size, inner.offset, inner.strides,
            inner.ops, inner.record,
        )  # fmt: skip


def read_values(source: Source, name: str, items: list[tuple[int, Item]], path: Path) -> Assembled:
    """Read a bytes item, of one rank or of each. Tensors inside become tensors of their own."""
    ranks: dict[int, dict[str, Leaf]] = {}
    for rank, item in items:
        with coded(UNCODED, tensor=name):
            opened = _open(source, item, name, _LARGEST_VALUE, _LARGEST_VALUE)
            leaves = read_leaves(opened.file, source, prefix=path)
        if any(isinstance(leaf.value, PlainLeaf) for leaf in leaves.values()):
            ranks[rank] = {n: _placed(leaf, opened) for n, leaf in leaves.items()}
        else:
            ranks[rank] = {name: Leaf(path, opened.file.value)}
    return assemble(ranks)


def _placed(leaf: Leaf, opened: _Opened) -> Leaf:
    if not isinstance(leaf.value, PlainLeaf):
        return leaf
    return replace(leaf, value=replace(leaf.value, place=opened.place(leaf.value.place)))


def locate(source: Source, catalog: Catalog) -> Catalog:
    """Open the items of the catalog's tensors and check them against the metadata."""
    problems: list[str] = []
    tensors = {}
    expect_edges(source, _items_of(catalog))
    for name, entry in catalog.tensors.items():
        chunks = []
        for chunk in entry.chunks:
            try:
                chunks.append(_located(source, entry, chunk))
            except CkptoolError as error:
                problems.append(error.message)
                error.message.tensor = name
        tensors[name] = replace(entry, chunks=tuple(chunks))
    if problems:
        raise damaged(problems, subject="the items", hint=DAMAGE_HINT)
    return catalog.with_tensors(tensors)


def _items_of(catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    for entry in catalog.tensors.values():
        for at in places(entry):
            if isinstance(at, Item):
                yield at.file, at.offset, at.nbytes


def _located(source: Source, entry: TensorEntry, chunk: Chunk) -> Chunk:
    copies = tuple(
        replace(copy, at=_located_place(source, entry, chunk.box, copy.at)) for copy in chunk.copies
    )
    return replace(chunk, at=_located_place(source, entry, chunk.box, chunk.at), copies=copies)


def _located_place(source: Source, entry: TensorEntry, box: Box, at: Place) -> Place:
    if not isinstance(at, Item):
        return at
    what = f"{entry.name} {box}"
    dtype = entry.source_dtype
    shape = at.part.shape if at.part else box.shape
    limit = math.prod(shape) * dtype.itemsize * 2 + _OVERHEAD
    opened = _open(source, at, what, limit, _EDGE)
    tensor = plain_tensor(opened.file.value)
    if tensor is None:
        message = f"{what}: its item in {at.file} holds {type_name(opened.file.value)}"
        raise Damaged(Problem(f"{message}, no plain tensor", "item-mismatch", file=at.file))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        message = f"{what}: its item at byte {at.offset:,} of {at.file} is {tensor.dtype}"
        message += f" {list(tensor.shape)}, the metadata says {dtype} {list(shape)}"
        raise Damaged(Problem(message, "item-mismatch", file=at.file))
    place = opened.place(place_of(tensor, opened.file))
    if at.part is None:
        return place
    try:
        start, strides = at.part.start, at.part.strides
        return part_of_place(place, shape, box.shape, start, strides, dtype.itemsize)
    except ValueError as error:
        message = f"{what}: its item in {at.file} is {error}"
        raise Damaged(Problem(message, "item-mismatch", file=at.file)) from None


def _open(source: Source, item: Item, what: str, limit: int, edge: int) -> _Opened:
    """Open the archive of one item.

    One that is packed is decoded, to ``limit`` bytes at most; the first and last ``edge`` of them
    are kept.
    """
    region = item_region(source, item, what, limit, edge)
    head = region.read(0, min(region.nbytes, 9))
    if not item.transforms and not is_zip(head):
        kind = (
            " (safetensors data, which torch itself cannot read back)" if head[8:] == b"{" else ""
        )
        message = f"{what}: no torch.save archive at byte {item.offset:,} of {item.file}{kind}"
        raise Damaged(Problem(message, "item-mismatch", file=item.file))
    return _Opened(read_torch_zip(region), item, region.nbytes)
