"""What a transfer will read, from its plan alone."""

from __future__ import annotations

from itertools import chain

from msgspec.structs import astuple

from ckptool.core.catalog import Extent, Opening, TensorEntry
from ckptool.core.chunks import chunks_of
from ckptool.core.layout import WrittenChunks
from ckptool.core.planning.groups import Group
from ckptool.core.planning.plan import Plan
from ckptool.engine.read.containers import Need, runs_of
from ckptool.engine.read.segments import entry_needs, place_needs
from ckptool.storage.files import Files
from ckptool.storage.planned_ranges import join_runs, unversioned


def bytes_to_read(plan: Plan, source: Files) -> int:
    """Return the bytes that a run of the plan reads from the source's files, tile by tile.

    More than the tensors hold if a gap costs less than another read, or if several files need one
    chunk that must be decoded completely. From a store each byte is read once for some files.
    """
    total, cache = 0, dict[object, int]()
    opened: set[Opening] = set()
    tables = plan.layout.tables
    if not source.policy.by_request and tables is not None:
        tile = source.policy.tile
        return sum(_table_bytes(plan, name, tables[name], tile, cache, opened) for name in tables)
    for batch in plan.batches(range(len(plan.layout.files))):
        parts = {number: plan.layout.files[number].parts for number in batch}
        groups = plan.groups(parts, source.policy.tile)
        if not source.policy.by_request:
            total += sum(_group_bytes(plan, group, cache, opened) for group in groups)
        else:
            needs = chain.from_iterable(
                _group_runs(plan, group, source.policy.block) for group in groups
            )
            runs = runs_of(needs, opened)
            total += sum(part.nbytes for part in join_runs(unversioned(runs)))
    return total


def _table_bytes(
    plan: Plan,
    name: str,
    table: WrittenChunks,
    limit: int,
    cache: dict[object, int],
    opened: set[Opening],
) -> int:
    """Return the bytes of a disk that are read for a tensor, computed once for similar ones."""
    entry = plan.catalog.tensors[name]
    stored = _describe_storage(entry)
    kind = table.cut, table.itemsize, entry.source_dtype, stored
    if stored is not None and kind in cache:
        return cache[kind]
    groups = plan.groups_of(name, table, limit)
    total = sum(_group_bytes(plan, group, cache, opened) for group in groups)
    if stored is not None:
        cache[kind] = total
    return total


def _describe_storage(entry: TensorEntry) -> object:
    """Return how a tensor's chunks are stored, relative to their place; None for closed ones."""
    chunks = chunks_of(entry)
    if chunks.extent is not None:
        return chunks.boxes, chunks.extent[2]
    stored = tuple(
        (chunk.box, chunk.at.strides, chunk.at.ops)
        for chunk in entry.chunks
        if isinstance(chunk.at, Extent)
    )
    return stored if len(stored) == len(entry.chunks) else None


def _group_bytes(plan: Plan, group: Group, cache: dict[object, int], opened: set[Opening]) -> int:
    """Return the bytes of a disk that a group reads; ``cache`` has those of similar groups.

    Groups are similar if their parts are at the same places, and their chunks have the same boxes
    and strides.
    """
    entry = plan.catalog.tensors[group.parts[0].part.name]
    stored = _describe_storage(entry)
    parts = tuple(astuple(spot.part)[1:] for spot in group.parts)
    kind = group.band, entry.source_dtype, parts, stored
    if stored is not None and kind in cache:
        return cache[kind]
    total = sum(nbytes for _, _, nbytes in runs_of(_group_runs(plan, group, 1), opened))
    if stored is not None:
        cache[kind] = total
    return total


def _group_runs(plan: Plan, group: Group, block: int) -> list[Need]:
    """Return the reads for the parts of a group; a band that they share is read once."""
    entry = plan.catalog.tensors[group.parts[0].part.name]
    if group.band is not None:
        return list(entry_needs(entry, [group.band], block))
    index, itemsize = plan.index(entry), entry.source_dtype.itemsize
    return [
        need
        for spot in group.parts
        for whole, _ in spot.part.pieces
        for overlap in index.find(whole)
        for need in place_needs(overlap.chunk.at, overlap.local, itemsize, block)
    ]
