"""ByteCheckpoint folders: ``model/``, ``optimizer/`` and ``extra_state/`` of one step.

Read: ByteCheckpoint 0.0.2 (its DDP, FSDP and FSDP2 checkpointers). Each of the first two is laid
out as in DCP, but an item is a tensor's bare bytes; its strides are in ``.metadata``, in the pickle
of each tensor without its bytes. The family begins each name. FSDP's decomposed form keeps flat
parameters, with their members in ``.metadata``: they are unflattened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Chunk, Container, Place, TensorEntry, places
from ckptool.core.selection import with_prefix
from ckptool.errors import Damaged, Problem, coded
from ckptool.formats.base import Detection, Format, Reading, ScanOptions
from ckptool.formats.companions import join_catalogs, scan_subfolder
from ckptool.formats.dcp import DcpMetadata, read_folder
from ckptool.serialization.archive.read import StoredBytes, TorchFile
from ckptool.serialization.archive.tensors import (
    StoredTensor,
    locate_tensor,
    read_natural,
    read_sizes,
    read_tensor,
)
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.source import Source, find_missing_ranks, require_rank
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.flat_params import FLAT, Member, unflatten
from ckptool.serialization.state_dict.leaves import read_file_leaves

_Metadata = Mapping[str, Any]
"""The fields of one family's ``.metadata``."""


def flat_members(files: Mapping[str, _Metadata]) -> dict[str, list[Member]]:
    """Return the members of each flat parameter, by its name."""
    by_flat: dict[str, list[Member]] = {}
    for name, metadata in files.items():
        record = metadata.get("user_defined_dict") or {}
        try:
            by_flat |= {
                flat: list(_members(flat, names, record))
                for flat, names in (record.get("fsdp_flat_param_to_fqns") or {}).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise Damaged(
                f"{name}: cannot determine what the flat parameters contain", "parameters-flat"
            ) from None
    return by_flat


def _members(flat: str, names: list[str], record: _Metadata) -> Iterator[Member]:
    """Yield the parameters of one flat parameter; names are relative to its unit, or whole."""
    head = flat.removesuffix(FLAT)
    whole = all(name.startswith(head) for name in names)
    pairs = list(zip(names, record["fsdp_shapes"][flat], strict=True))
    start = 0
    lengths = record["fsdp_numels_with_padding"][flat]
    for length, padding in zip(lengths, record["fsdp_is_padding_mask"][flat], strict=True):
        if not padding:
            name, shape = pairs.pop(0)
            name = (name if whole else head + name.lstrip(".")).lstrip(".")
            yield Member((name,), read_sizes(shape), start)
        start += read_natural(length)
    if pairs:
        raise IndexError


def unflatten_family(
    catalog: Catalog, flat: Mapping[str, list[Member]], options: ScanOptions
) -> Catalog:
    """Unflatten the flat parameters of one family, and their optimizer states."""
    members_of = {name: _members_in(entry, flat) for name, entry in catalog.tensors.items()}
    if not any(members_of.values()):
        return catalog
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        members = members_of[name]
        parts = unflatten(entry, members) if members else [entry]
        tensors |= {part.name: part for part in parts}
    return options.with_placements(replace(catalog, tensors=tensors, mesh=None))


def _members_in(entry: TensorEntry, flat: Mapping[str, list[Member]]) -> list[Member]:
    """Return the members of a flat parameter, or of an optimizer's state for one; else none."""
    if not entry.path:
        return []
    *head, last = map(str, entry.path)
    name, is_flat, state = last.partition(FLAT)
    if not is_flat or len(entry.shape) != 1:
        return []
    members = flat.get(name + FLAT, [])
    return [replace(member, path=(*head, f"{member.path[0]}{state}")) for member in members]


_Skeletons = Mapping[tuple[str, tuple[int, ...] | None], bytes]
"""By the name and offset of an item, the pickle of the tensor without its bytes."""


def _locate(catalog: Catalog, skeletons: _Skeletons, options: ScanOptions) -> Catalog:
    """Find the place of every element, checked against the metadata, for each item."""
    tensors = {}
    for name, entry in catalog.tensors.items():
        chunks = options.attempt(partial(_chunks, entry, skeletons))
        if chunks is not None:
            tensors[name] = replace(entry, chunks=chunks)
    bare = {at.file for entry in tensors.values() for at in places(entry)}
    return replace(catalog, tensors=tensors, bare=frozenset(bare), archives=())


def _chunks(entry: TensorEntry, skeletons: _Skeletons) -> tuple[Chunk, ...]:
    with coded("item-mismatch", tensor=entry.name):
        return tuple(
            chunk.at_places([_place(entry, chunk, skeletons, at) for at in chunk.places])
            for chunk in entry.chunks
        )


def _place(entry: TensorEntry, chunk: Chunk, skeletons: _Skeletons, at: Place) -> Place:
    if not isinstance(at, Container):
        return at
    what = f"{entry.name} {chunk.box} at byte {at.offset:,} of {at.file}"
    pickled = skeletons.get((entry.name, chunk.box.lo))
    if pickled is None:
        raise Damaged(f"{what}: .metadata does not record its strides", "metadata-unreadable")
    tensor = _skeleton(pickled)
    if tensor is None or (tensor.dtype, tensor.shape) != (entry.source_dtype, chunk.box.shape):
        raise Damaged(
            f"{what}: not the {entry.source_dtype} {list(chunk.box.shape)} expected",
            "item-mismatch",
        )
    stored = StoredBytes(at.file, at.offset, at.nbytes, at.nbytes)
    file = TorchFile(what, None, {tensor.storage.key: stored}, "little", len(pickled))
    return locate_tensor(tensor, file)


@lru_cache(maxsize=4096)
def _skeleton(pickled: bytes) -> StoredTensor | None:
    """Return the tensor that a pickle describes; many are equal."""
    return read_tensor(read_pickle(pickled, what="a tensor's record in .metadata").value)


_METADATA = re.compile(r"(?:(?P<family>model|optimizer|loader_ckpt)/)?\.metadata")
_SHARDS = re.compile(r"(model|optimizer|loader_ckpt)/__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_EXTRA = re.compile(r"extra_state/extra_state_rank_([0-9]{1,9})\.pt")
_CLASS = b"bytecheckpoint.checkpointer.meta_type"
_HEAD = 256
"""Bytes of ``.metadata`` in which its first class is named."""


def _parts(source: Source) -> dict[str, str]:
    """Return the metadata files, each with its family; empty for a family's own folder."""
    families = {}
    for name in source.files:
        match = _METADATA.fullmatch(name)
        if match and _CLASS in source.read(name, 0, min(source.files[name], _HEAD)):
            families[name] = match["family"] or ""
    return families


def _scan(source: Source, options: ScanOptions) -> Catalog:
    parts = _parts(source)
    if not parts:
        message = f"{source.root}: no .metadata that ByteCheckpoint wrote"
        raise Damaged(message, "save-incomplete")
    _require_families(source, parts, options)
    records: dict[str, DcpMetadata] = {}
    located: list[tuple[str, Catalog]] = []
    for name, family in parts.items():
        scan = partial(_scan_family, name, records)
        if family:
            catalog = scan_subfolder(scan, source, family, options, prefix=f"{family}.")
        else:
            catalog = scan(source, options)
        located.append((family, _locate(catalog, records[name].skeletons, options)))
    flat = flat_members({name: record.extra for name, record in records.items()})
    catalogs = [
        with_prefix(unflatten_family(catalog, flat, options), family)
        if family
        else unflatten_family(catalog, flat, options)
        for family, catalog in located
    ]
    world = max((catalog.world_size or 1 for catalog in catalogs), default=1)
    catalogs += _extra_state(source, options, world)
    version = next(r.extra.get("bytecheckpoint_version") for r in records.values())
    info = {"writer": "ByteCheckpoint"}
    info |= {"version": version} if isinstance(version, str) else {}
    return replace(join_catalogs(*catalogs), format="bytecheckpoint", info=info)


def _require_families(source: Source, parts: Mapping[str, str], options: ScanOptions) -> None:
    """Report families with data files but no metadata."""
    families = {match[1] for name in source.files if (match := _SHARDS.fullmatch(name))}
    missing = [f"{family}/.metadata" for family in sorted(families.difference(parts.values()))]
    problems = [
        Problem(
            f"{name} is missing, which describes the files beside it", "file-missing", file=name
        )
        for name in missing
    ]
    options.report(problems, subject=source.root, hint="name the other folder by itself to read it")


def _scan_family(
    name: str, records: dict[str, DcpMetadata], source: Source, options: ScanOptions
) -> Catalog:
    """Read the folder of one family, and add its metadata to ``records``."""
    catalog, parsed = read_folder(source, options)
    records.update((name, metadata) for metadata in parsed.values())
    return options.with_placements(catalog)


def _extra_state(source: Source, options: ScanOptions, world: int) -> list[Catalog]:
    """Read each rank's own state, of ``world`` ranks or more; none if there is none."""
    files = {int(m[1]): m.string for m in filter(None, map(_EXTRA.fullmatch, source.files))}
    if not files:
        return []
    require_rank(max(files), _EXTRA.pattern)
    ranks = {
        rank: read_file_leaves(source, file, prefix=("extra_state",), rank_state=True)
        for rank, file in sorted(files.items())
    }
    state = assemble(ranks, per_rank=options.per_rank)
    options.report(state.problems, subject="extra_state")
    state.notes += _lost_extra_state(files, world)
    return [state.catalog("", source, files.values(), world_size=len(files))]


def _lost_extra_state(files: Mapping[int, str], world: int) -> list[Problem]:
    """Return the ranks without a file: either every rank writes its own, or none does."""
    missing = find_missing_ranks(files, max(world, max(files) + 1))
    if not missing:
        return []
    file = files[min(files)]
    message = f"the extra state of rank {', '.join(map(str, missing))} is missing beside {file}"
    return [Problem(message, "rank-missing", file=file)]


FORMAT = Format(
    "bytecheckpoint",
    "ByteCheckpoint folder (model, optimizer, extra_state)",
    Detection(_parts),
    Reading(_scan),
)
