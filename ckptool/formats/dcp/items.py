"""The items of a DCP folder, opened: each is a torch.save archive of one chunk or one value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Container, Path, Place, TensorEntry, places
from ckptool.core.dtype import DType
from ckptool.core.views import part_of_place
from ckptool.errors import (
    UNCODED,
    CkptoolError,
    Damaged,
    Problem,
    Refusal,
    SourceError,
    Unsupported,
    coded,
    damaged,
    refused,
)
from ckptool.formats.dcp.inventory import DAMAGE_HINT
from ckptool.serialization.archive.read import TorchFile, is_zip, read_torch_zip
from ckptool.serialization.archive.tensors import (
    is_tensor_record,
    locate_tensor,
    read_outer,
    read_tensor,
)
from ckptool.serialization.source import Source, expect_edges
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import (
    Assembled,
    Leaf,
    PlainLeaf,
    ShareLeaf,
    read_leaves,
)
from ckptool.serialization.state_dict.values import type_name
from ckptool.serialization.zip import item_region

_LARGEST_VALUE = 1 << 26
_EDGE = 1 << 16
_OVERHEAD = 1 << 20


def read_values(
    source: Source, name: str, items: list[tuple[int, Container]], path: Path
) -> Assembled:
    """Read a bytes item, of one rank or of each. Tensors inside become tensors of their own.

    Where it cannot be read, or must not be, that is a conflict under the item's name.
    """
    ranks: dict[int, dict[str, Leaf]] = {}
    for rank, item in items:
        try:
            with coded(UNCODED, tensor=name):
                ranks[rank] = _value_leaves(source, name, item, path)
        except SourceError as error:
            return Assembled(conflicts={name: _refusal(name, error.message)})
    return assemble(ranks)


def _refusal(name: str, problem: Problem) -> Refusal:
    message = problem if problem.startswith(name) else f"{name}: {problem}"
    return Refusal(message, problem.code, file=problem.file, tensor=name)


def _value_leaves(source: Source, name: str, item: Container, path: Path) -> dict[str, Leaf]:
    """Return what an item holds; where some of it is refused, the item is, as it is one value."""
    opened = _open(source, item, name, _LARGEST_VALUE, _LARGEST_VALUE)
    leaves = read_leaves(opened, source, prefix=path)
    has_tensor = any(isinstance(leaf.value, PlainLeaf | ShareLeaf) for leaf in leaves.values())
    parts = [leaf.value for leaf in leaves.values() if isinstance(leaf.value, Refusal)]
    if parts:
        refusal = _refusal(name, parts[0])
        refusal.record = opened.inert
        refusal.may_be_tensor = has_tensor or any(part.may_be_tensor for part in parts)
        return {name: Leaf(path, refusal)}
    if has_tensor:
        return leaves
    return {name: Leaf(path, opened.value)}


class _NoPlainTensor(Unsupported):
    """An item holds a tensor of another kind, where the metadata has only its type and shape."""


def locate(source: Source, catalog: Catalog) -> Catalog:
    """Open the items of the catalog's tensors and check them against the metadata.

    The metadata does not tell a tensor subclass that wraps others from a plain tensor: one that
    lies in one item is replaced by the tensors in it. Raises Unsupported where one lies in several,
    or is of a kind that is not read, Damaged where an item is not what the metadata says.
    """
    problems: list[Problem] = []
    unread: list[Problem] = []
    contents = Assembled()
    expect_edges(source, _items_of(catalog))
    for name, entry in catalog.tensors.items():
        try:
            contents.tensors[name] = _locate_entry(source, entry)
        except _NoPlainTensor as error:
            inner = _read_inner_tensors(source, entry)
            if inner is None or not inner.tensors.keys().isdisjoint(catalog.tensors):
                unread.append(error.message)
            else:
                contents.add(inner)
        except CkptoolError as error:
            problems += error.problems
    if problems:
        raise damaged(problems, subject="the items", hint=DAMAGE_HINT)
    if unread:
        raise _unread_tensors(unread)
    objects, notes = catalog.objects | contents.objects, (*catalog.notes, *contents.notes)
    return replace(catalog, tensors=contents.tensors, objects=objects, notes=notes)


def _locate_entry(source: Source, entry: TensorEntry) -> TensorEntry:
    """Open the items of a tensor; one error is raised for all of its chunks that cannot be."""
    chunks: list[Chunk] = []
    problems: list[Problem] = []
    for chunk in entry.chunks:
        try:
            chunks.append(chunk.map_places(partial(_locate_place, source, entry, chunk.box)))
        except _NoPlainTensor:
            raise
        except CkptoolError as error:
            error.message.tensor = entry.name
            problems.append(error.message)
    if problems:
        raise damaged(problems, subject=entry.name)
    return replace(entry, chunks=tuple(chunks))


def _read_inner_tensors(source: Source, entry: TensorEntry) -> Assembled | None:
    """Read the one item of a tensor that wraps others; None where that is not all of it."""
    chunk = entry.chunks[0]
    item = chunk.at
    is_one = len(entry.chunks) == 1 and not chunk.copies and entry.stored is None
    if not is_one or not isinstance(item, Container) or item.part or chunk.box.shape != entry.shape:
        return None
    inner = read_values(source, entry.name, [(chunk.rank or 0, item)], entry.path)
    if inner.refusals:
        raise refused([*inner.refusals.values()], subject=entry.name)
    return inner if inner.tensors and not inner.problems else None


def _unread_tensors(problems: list[Problem]) -> Unsupported:
    """Return one error for all tensors of kinds that are not read."""
    more = f"\n  and {len(problems) - 1:,} more such tensors" if len(problems) > 1 else ""
    error = Unsupported(
        f"{problems[0]}{more}",
        problems[0].code,
        tensor=problems[0].tensor,
        hint="--drop NAME leaves one out; in torch: save tensors made plain",
    )
    error.problems = tuple(problems)
    return error


def _items_of(catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    for entry in catalog.tensors.values():
        for at in places(entry):
            if isinstance(at, Container):
                yield at.file, at.offset, at.nbytes


def _locate_place(source: Source, entry: TensorEntry, box: Box, at: Place) -> Place:
    if not isinstance(at, Container):
        return at
    what = f"{entry.name} {box}"
    dtype = entry.source_dtype
    shape = at.part.shape if at.part else box.shape
    limit = math.prod(shape) * dtype.itemsize * 2 + _OVERHEAD
    opened = _open(source, at, what, limit, _EDGE)
    tensor = read_tensor(opened.value)
    if tensor is None:
        raise _no_tensor(opened.value, f"{what}: its item in {at.file}", at, (dtype, shape))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        message = f"{what}: its item at byte {at.offset:,} of {at.file} is {tensor.dtype}"
        message += f" {list(tensor.shape)}, the metadata says {dtype} {list(shape)}"
        raise Damaged(message, "item-mismatch", file=at.file)
    place = locate_tensor(tensor, opened)
    if at.part is None:
        return place
    try:
        start, strides = at.part.start, at.part.strides
        return part_of_place(place, shape, box.shape, start, strides, dtype.itemsize)
    except ValueError as error:
        message = f"{what}: its item in {at.file} is {error}"
        raise Damaged(message, "item-mismatch", file=at.file) from None


def _no_tensor(
    value: Any, what: str, item: Container, expected: tuple[DType, tuple[int, ...]]
) -> CkptoolError:
    """Return why an item is no plain tensor of the type and shape that are ``expected``."""
    outer = read_outer(value) if is_tensor_record(value) else expected
    if not is_tensor_record(value) or outer not in (None, expected):
        message = f"{what} holds {type_name(value)}, no plain tensor"
        return Damaged(message, "item-mismatch", file=item.file)
    message = f"{what} holds a tensor of a kind that is not read ({type_name(value)})"
    return _NoPlainTensor(message, "tensor-unsupported", file=item.file)


def _open(source: Source, item: Container, what: str, limit: int, edge: int) -> TorchFile:
    """Open the archive of one item, decoded as ``item_region`` does."""
    region = item_region(source, item, what, limit, edge)
    head = region.read(0, min(region.nbytes, 9))
    if not item.transforms and not is_zip(head):
        kind = (
            " (safetensors data, which torch itself cannot read back)" if head[8:] == b"{" else ""
        )
        message = f"{what}: no torch.save archive at byte {item.offset:,} of {item.file}{kind}"
        raise Damaged(message, "item-mismatch", file=item.file)
    opened = read_torch_zip(region)
    return replace(opened, packed=(item, region.nbytes)) if item.transforms else opened
