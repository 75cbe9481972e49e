"""The views of a checkpoint: what a command was asked to show of it, and that as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptool.commands.document import plain
from ckptool.commands.inspect.report import InspectReport, ModuleShare, modules_of
from ckptool.commands.options.inspect import OVERVIEW, InspectOptions
from ckptool.core.box import Box, contiguous
from ckptool.core.catalog import Catalog, Computed, Container, EncodedBlob, Place, TensorEntry
from ckptool.core.selection import is_used, tensors_named
from ckptool.core.text import natural_key

if TYPE_CHECKING:
    from ckptool.commands.reshard.holdings import MeshHoldings

Loads = dict[int, tuple[int, int]]
"""Chunks, or tensors, and bytes by rank."""


def inspect_json(
    report: InspectReport,
    options: InspectOptions = OVERVIEW,
    holdings: MeshHoldings | None = None,
    *,
    is_table: bool = False,
) -> dict[str, Any]:
    """Return the report as ``ckptool.inspect/2``; ``value`` is omitted if JSON cannot hold it.

    With globs only the ``tensors`` that match, in the checkpoint's order unless they are sorted by
    size, or for a table; ``rank_bytes``, ``shards``, ``modules`` and ``holdings`` only on request.
    """
    catalog, sort = report.catalog, options.sort
    of_tensors, _ = split_patterns(catalog, options.tensors)
    names = tensors_named(catalog, of_tensors, "NAME") if options.tensors else catalog.tensors
    entries = [catalog.tensors[name] for name in names]
    as_stored = sort == "name" and not is_table
    content = report.to_dict(entries if as_stored else in_order(entries, sort))
    if options.depth is not None:
        content["modules"] = plain(sorted_modules(report, options.depth, sort))
    if options.rank_bytes:
        loads = sorted(loads_of(catalog)[0].items())
        content["rank_bytes"] = [{"rank": r, "chunks": n, "bytes": size} for r, (n, size) in loads]
    if holdings is not None:
        rows = enumerate(holdings.loads)
        content["holdings"] = [{"rank": r, "tensors": n, "bytes": size} for r, (n, size) in rows]
    if options.shards is not None:
        shard_names = tensors_named(catalog, [options.shards], "--shards")
        content["shards"] = [row for n in shard_names for row in _shards_json(catalog.tensors[n])]
    return content


def _shards_json(entry: TensorEntry) -> list[dict[str, Any]]:
    """List every box of a tensor, including replicas: its rank, file and place."""
    return [
        {
            "tensor": entry.name,
            "rank": location.rank,
            "file": location.at.file,
            "offset": location.at.offset,
            "bytes": location.nbytes,
            "from": list(location.box.lo),
            "to": list(location.box.hi),
        }
        for location in chunk_locations(entry)
    ]


def split_patterns(catalog: Catalog, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the patterns that name tensors, or nothing, and those that name values alone."""

    def is_of_values(pattern: str) -> bool:
        if pattern in catalog.objects or pattern in catalog.tensors:
            return pattern not in catalog.tensors
        return not is_used(pattern, catalog.tensors) and is_used(pattern, catalog.objects)

    values = [*filter(is_of_values, patterns)]
    return [pattern for pattern in patterns if pattern not in values], values


def in_order(entries: Iterable[TensorEntry], sort: str) -> list[TensorEntry]:
    """Sort tensors by ``name``, layer 2 before layer 10, or by ``size``, the largest first."""
    by_name = sorted(entries, key=lambda entry: natural_key(entry.name))
    return sorted(by_name, key=lambda entry: -entry.nbytes) if sort == "size" else by_name


def sorted_modules(report: InspectReport, depth: int, sort: str) -> list[ModuleShare]:
    """Return the modules by name, layer 2 before layer 10, or the largest first."""
    modules = modules_of(report.catalog.tensors.values(), depth)
    modules.sort(key=lambda share: natural_key(share.module))
    return sorted(modules, key=lambda share: -share.nbytes) if sort == "size" else modules


def loads_of(catalog: Catalog) -> tuple[Loads, int]:
    """Sum up what each rank stored, replicas at their own rank, and the bytes of no known rank."""
    loads: Loads = dict.fromkeys(range(catalog.world_size or 0), (0, 0))
    unknown = 0
    for entry in catalog.tensors.values():
        for chunk in entry.chunks:
            nbytes = chunk.box.volume * entry.source_dtype.itemsize
            for rank in chunk.ranks:
                if rank is None:
                    unknown += nbytes
                else:
                    chunks, total = loads.get(rank, (0, 0))
                    loads[rank] = (chunks + 1, total + nbytes)
    are_known = any(chunks for chunks, _ in loads.values())
    return (loads if are_known else {}), unknown


class ChunkLocation(Struct, frozen=True):
    """One box in one file; ``remark`` says how the bytes are stored if not plainly."""

    rank: int | None
    box: Box
    at: Place
    nbytes: int
    remark: str


def chunk_locations(entry: TensorEntry) -> Iterator[ChunkLocation]:
    """Yield every box of a tensor and where it is stored, replicas included."""
    itemsize = entry.source_dtype.itemsize
    for chunk in entry.chunks:
        for rank, at in zip(chunk.ranks, chunk.places, strict=True):
            nbytes, remark = _storage_of(at, chunk.box, itemsize)
            yield ChunkLocation(rank, chunk.box, at, nbytes, remark)


def _storage_of(at: Place, box: Box, itemsize: int) -> tuple[int, str]:
    """Return the bytes in the file, and how they are stored."""
    if isinstance(at, EncodedBlob):
        return at.nbytes, f"{at.codec}, {at.size:,} bytes decoded"
    if isinstance(at, Container):
        return at.nbytes, "+".join(at.transforms)
    if isinstance(at, Computed):
        return box.volume * itemsize, "from values and scales"
    strided = not contiguous(at.strides, box.shape, itemsize)
    return box.volume * itemsize, ", ".join([*(["strided"] if strided else []), *at.ops])
