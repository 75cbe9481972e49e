"""The items of a DCP folder, opened: each is a torch.save archive of one chunk or one value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Container, Path, Place, TensorEntry, merge_copies
from ckptool.core.chunks import ChunkTable, Joined, LateChunks, RecordTable
from ckptool.errors import (
    UNCODED,
    UNREAD,
    CkptoolError,
    Problem,
    Refusal,
    SourceError,
    coded,
    damaged,
    refused,
)
from ckptool.formats.dcp.alike import AlikeItems
from ckptool.formats.dcp.inventory import DAMAGE_HINT
from ckptool.formats.dcp.opening import (
    Item,
    NoPlainTensor,
    Openings,
    closed_items,
    open_item,
    part_of_item,
)
from ckptool.serialization.archive.sharded_state import is_optimizer_state, place_part
from ckptool.serialization.source import Source, expect_items
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import (
    Assembled,
    Leaf,
    PlainLeaf,
    ShareLeaf,
    read_leaves,
)
from ckptool.serialization.state_dict.values import same_value

_LARGEST_VALUE = 1 << 26
_EDGE = 1 << 16


def read_values(
    source: Source, name: str, items: list[tuple[int, Container]], path: Path
) -> Assembled:
    """Read a bytes item, of one rank or of each. Tensors inside become separate tensors.

    If it cannot or must not be read, that is a conflict under the item's name.
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
    """Return the leaves of an item, which is one value: refused if any part of it is."""
    opened = open_item(source, item, name, _LARGEST_VALUE, _LARGEST_VALUE)
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


def locate(source: Source, catalog: Catalog, *, defers: bool = False) -> Catalog:
    """Open the items of the catalog's tensors and check them against the metadata.

    The metadata does not distinguish a tensor subclass that wraps others from a plain tensor: one
    in a single item is replaced by the tensors in it. Raises Unsupported if one is in several, or
    is of an unsupported kind, Damaged if an item contradicts the metadata. If it ``defers``, items
    as large as those of plain tensors are opened when they are read.
    """
    closed_catalog = catalog
    if defers:
        catalog = Openings(source, catalog, partial(locate, source, catalog)).deferred()
    problems: list[Problem] = []
    unread: list[Problem] = []
    contents = Assembled()
    tensors = catalog.tensors.items()
    entries = {n: e for n, e in tensors if not isinstance(e.chunks, LateChunks | RecordTable)}
    expect_items(source, Joined([_closed_places(entry) for entry in entries.values()]))
    items = AlikeItems(source, entries.values())
    for name, entry in catalog.tensors.items():
        if name not in entries:
            contents.tensors[name] = entry
            continue
        if (records := items.table(entry)) is not None:
            contents.tensors[name] = replace(entry, chunks=records)
            continue
        try:
            chunks: Sequence[Chunk] = _locate_chunks(entry, items)
            table = closed_catalog.tensors[name].chunks
            if isinstance(table, ChunkTable):
                opened = dict(enumerate(chunks))  # all are; a plan is known by the table
                chunks = LateChunks(table, lambda chunk: chunk, opened)
            contents.tensors[name] = replace(entry, chunks=chunks)
        except NoPlainTensor as error:
            inner = _read_inner_tensors(source, entry) or _read_sharded_state(source, entry)
            if inner is None or not inner.tensors.keys().isdisjoint(catalog.tensors):
                unread.append(error.message)
            else:
                contents.add(inner)
        except CkptoolError as error:
            problems += error.problems
    if problems and defers:
        locate(source, closed_catalog)  # raises the problems of the others, too
    if problems:
        raise damaged(problems, subject="the items", hint=DAMAGE_HINT)
    if unread:
        raise refused(unread, subject="the items")
    objects, notes = catalog.objects | contents.objects, (*catalog.notes, *contents.notes)
    return replace(catalog, tensors=contents.tensors, objects=objects, notes=notes)


def _locate_chunks(entry: TensorEntry, items: AlikeItems) -> tuple[Chunk, ...]:
    """Open the items of a tensor's chunks; raise one error for all that fail."""
    chunks: list[Chunk] = []
    problems: list[Problem] = []
    for chunk in entry.chunks:
        try:
            places = [_locate_place(entry, chunk.box, at, items) for at in chunk.places]
        except CkptoolError as error:
            error.message.tensor = entry.name
            if isinstance(error, NoPlainTensor):
                raise
            problems.append(error.message)
        else:
            chunks.append(chunk.at_places(places))
    if problems:
        raise damaged(problems, subject=entry.name)
    return tuple(chunks)


def _locate_place(entry: TensorEntry, box: Box, at: Place, items: AlikeItems) -> Place:
    if not isinstance(at, Container) or at.opening is not None:
        return at
    item = Item.of(entry, box, at)
    place = items.locate(item)
    return place if at.part is None else part_of_item(item, place, at.part, box.shape)


def _read_inner_tensors(source: Source, entry: TensorEntry) -> Assembled | None:
    """Read the only item of a tensor that wraps others; None if it has several."""
    chunk = entry.chunks[0]
    item = chunk.at
    is_one = len(entry.chunks) == 1 and not chunk.copies and entry.stored is None
    if not is_one or not isinstance(item, Container) or item.part or chunk.box.shape != entry.shape:
        return None
    inner = read_values(source, entry.name, [(chunk.rank or 0, item)], entry.path)
    unsound = [why for why in inner.refusals.values() if why.code != UNREAD]
    if unsound:
        raise refused(unsound, subject=entry.name)
    return inner if inner.tensors and not inner.problems and not inner.refusals else None


def _read_sharded_state(source: Source, entry: TensorEntry) -> Assembled | None:
    """Read the items of a state whose inner tensors are cut as its rows are; None for another."""
    chunks: dict[str, list[Chunk]] = {}
    state = Assembled()
    for chunk in entry.chunks:
        at = chunk.at
        if chunk.copies or entry.stored is not None or not isinstance(at, Container) or at.part:
            return None
        opened = open_item(source, at, entry.name, _LARGEST_VALUE, _EDGE)
        if not is_optimizer_state(opened.inert):
            return None
        rank = chunk.rank or 0
        inner = assemble({rank: read_leaves(opened, source, prefix=entry.path)})
        for name, part in inner.tensors.items():
            placed = place_part(str(part.path[-1]), part.shape, chunk.box, entry.shape)
            if placed is None or inner.problems or inner.refusals:
                return None
            shape, box = placed
            tensor = replace(part, shape=shape, chunks=())
            if state.tensors.setdefault(name, tensor) != tensor:
                return None
            chunks.setdefault(name, []).append(Chunk(box, part.chunks[0].at, rank))
        objects = state.objects or inner.objects
        values = inner.objects.items()
        if not all(n in objects and same_value(objects[n].value, v.value) for n, v in values):
            return None
        state.objects = objects
        state.notes = list(inner.notes)
    for name, part in state.tensors.items():
        state.tensors[name] = replace(part, chunks=merge_copies(chunks[name]))
    return state


def _closed_places(entry: TensorEntry) -> Sequence[Container]:
    """Return the unopened items of a tensor, as they are in files."""
    if isinstance(entry.chunks, ChunkTable):
        return entry.chunks.items
    return [item.at for item in closed_items(entry)]
