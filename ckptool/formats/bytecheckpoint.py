"""ByteCheckpoint folders: ``model/``, ``optimizer/`` and ``extra_state/`` of one step.

Read: ByteCheckpoint 0.0.2 (its DDP, FSDP and FSDP2 checkpointers). Each of the first two is laid
out as DCP does, but an item is a tensor's bare bytes; how they are strided is in ``.metadata``, a
pickle inside the pickle. The family begins each name. FSDP's decomposed form keeps flat
parameters, and in ``.metadata`` what they are made of: they are taken apart.

The flat parameters of FSDP's decomposed form, as ByteCheckpoint saves them.

What each is made of is in ``.metadata``; it is taken apart.

Where the bytes of ByteCheckpoint's tensors lie: bare in its files, strided as a pickle says.

``.metadata`` holds for each item the pickle of its tensor without the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ckptool.core.catalog import Catalog, Chunk, Container, Place, TensorEntry, places
from ckptool.core.rewrite import with_prefix
from ckptool.core.sharding.infer import with_inferred_mesh
from ckptool.errors import Damaged, Problem, coded
from ckptool.formats.base import Format, ScanOptions
from ckptool.formats.companions import relocated, scanned_below, together
from ckptool.formats.dcp import scan_folder
from ckptool.serialization.archive.read import StoredBytes, TorchFile, read_torch_file
from ckptool.serialization.archive.tensors import (
    StoredTensor,
    locate_tensor,
    read_natural,
    read_sizes,
    read_tensor,
)
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source, find_missing_ranks, read_metadata, require_rank
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.flat_params import FLAT, Member, unflatten
from ckptool.serialization.state_dict.leaves import read_leaves
from ckptool.serialization.state_dict.values import note_unread


def flat_members(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Member]]:
    """What each flat parameter is made of, by its name; empty where there are none."""
    found: dict[str, list[Member]] = {}
    for name, each in fields.items():
        told = each.get("user_defined_dict") or {}
        try:
            found |= {
                flat: list(_members(flat, names, told))
                for flat, names in (told.get("fsdp_flat_param_to_fqns") or {}).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise Damaged(
                f"{name}: what flat parameters are made of is unclear", "parameters-flat"
            ) from None
    return found


def _members(flat: str, names: list[str], told: Mapping[str, Any]) -> Iterator[Member]:
    """The parameters of one flat parameter; names are relative to its unit, or whole."""
    head = flat.removesuffix(FLAT)
    whole = all(name.startswith(head) for name in names)
    left = list(zip(names, told["fsdp_shapes"][flat], strict=True))
    start = 0
    lengths = told["fsdp_numels_with_padding"][flat]
    for length, padding in zip(lengths, told["fsdp_is_padding_mask"][flat], strict=True):
        if not padding:
            name, shape = left.pop(0)
            name = (name if whole else head + name.lstrip(".")).lstrip(".")
            yield Member((name,), read_sizes(shape), start)
        start += read_natural(length)
    if left:
        raise IndexError


def apart(catalog: Catalog, flat: Mapping[str, list[Member]]) -> Catalog:
    """The catalog of one family with its flat parameters, and states of them, taken apart."""
    found = {name: _whose(entry, flat) for name, entry in catalog.tensors.items()}
    if not any(found.values()):
        return catalog
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        members = found[name]
        parts = unflatten(entry, members) if members else [entry]
        tensors |= {part.name: part for part in parts}
    return with_inferred_mesh(replace(catalog, tensors=tensors, mesh=None))


def _whose(entry: TensorEntry, flat: Mapping[str, list[Member]]) -> list[Member]:
    """The members of a flat parameter, or of an optimizer's state for one; none of others."""
    if not entry.path:
        return []
    *head, last = map(str, entry.path)
    name, found, state = last.partition(FLAT)
    members = flat.get(name + found, []) if len(entry.shape) == 1 else []
    return [
        replace(member, path=(*head, f"{member.path[0]}{state}")) for member in members if found
    ]


Skeletons = Mapping[tuple[str, int, int], bytes]
"""For the file, offset and length of an item, the pickle of the tensor without its bytes."""


def skeletons_of(fields: Mapping[str, Mapping[str, Any]], parts: Mapping[str, str]) -> Skeletons:
    found: dict[tuple[str, int, int], bytes] = {}
    for name, family in parts.items():
        told = fields[name]
        try:
            pickles = {_key(k): v for k, v in (told["all_tensor_metadata"] or {}).items()}
            for index, info in told["storage_data"].items():
                where = info.fields
                file = "/".join(filter(None, (family, where["relative_path"])))
                pickled = pickles.get(_key(index))
                if isinstance(pickled, bytes):
                    found[file, read_natural(where["offset"]), read_natural(where["length"])] = (
                        pickled
                    )
        except (KeyError, TypeError, AttributeError):
            message = f"{name}: not as ByteCheckpoint writes it"
            raise Damaged(message, "metadata-unreadable", file=name) from None
    return found


def _key(index: Call) -> tuple[str, tuple[int, ...] | None]:
    offset = index.fields.get("offset")
    return str(index.fields["fqn"]), None if offset is None else read_sizes(offset)


def placed(catalog: Catalog, skeletons: Skeletons, options: ScanOptions) -> Catalog:
    """With the place of every element, checked against the metadata, for each item."""
    tensors = {}
    for name, entry in catalog.tensors.items():
        chunks = options.attempt(partial(_chunks, entry, skeletons))
        if chunks is not None:
            tensors[name] = replace(entry, chunks=chunks)
    bare = {at.file for entry in tensors.values() for at in places(entry)}
    return replace(catalog, tensors=tensors, bare=frozenset(bare), archives=())


def _chunks(entry: TensorEntry, skeletons: Skeletons) -> tuple[Chunk, ...]:
    with coded("item-mismatch", tensor=entry.name):
        return tuple(_chunk(entry, chunk, skeletons) for chunk in entry.chunks)


def _chunk(entry: TensorEntry, chunk: Chunk, skeletons: Skeletons) -> Chunk:
    copies = tuple(
        replace(copy, at=_place(entry, chunk, copy.at, skeletons)) for copy in chunk.copies
    )
    return replace(chunk, at=_place(entry, chunk, chunk.at, skeletons), copies=copies)


def _place(entry: TensorEntry, chunk: Chunk, at: Place, skeletons: Skeletons) -> Place:
    if not isinstance(at, Container):
        return at
    what = f"{entry.name} {chunk.box} at byte {at.offset:,} of {at.file}"
    pickled = skeletons.get((at.file, at.offset, at.nbytes))
    if pickled is None:
        raise Damaged(
            f"{what}: .metadata does not say how its bytes are strided", "metadata-unreadable"
        )
    tensor = _skeleton(pickled)
    if tensor is None or (tensor.dtype, tensor.shape) != (entry.source_dtype, chunk.box.shape):
        raise Damaged(
            f"{what}: no {entry.source_dtype} {list(chunk.box.shape)}, as it should be",
            "item-mismatch",
        )
    stored = StoredBytes(at.file, at.offset, at.nbytes, at.nbytes)
    file = TorchFile(what, None, {tensor.storage.key: stored}, "little", {}, len(pickled))
    return locate_tensor(tensor, file)


@lru_cache(maxsize=4096)
def _skeleton(pickled: bytes) -> StoredTensor | None:
    """The tensor that a pickle describes; many are alike."""
    return read_tensor(read_pickle(pickled, what="a tensor's record in .metadata").value)


_METADATA = re.compile(r"(?:(?P<family>model|optimizer|loader_ckpt)/)?\.metadata")
_SHARDS = re.compile(r"(model|optimizer|loader_ckpt)/__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_EXTRA = re.compile(r"extra_state/extra_state_rank_([0-9]{1,9})\.pt")
_CLASS = b"bytecheckpoint.checkpointer.meta_type"
_HEAD = 256


def _parts(source: Source) -> dict[str, str]:
    """The metadata files, each with its family; empty for a family's own folder."""
    found = {}
    for name in source.files:
        match = _METADATA.fullmatch(name)
        if match and _CLASS in source.read(name, 0, min(source.files[name], _HEAD)):
            found[name] = match["family"] or ""
    return found


def _probe(source: Source) -> bool:
    return bool(_parts(source))


def _scan(source: Source, options: ScanOptions) -> Catalog:
    parts = _parts(source)
    if not parts:
        message = f"{source.root}: no .metadata that ByteCheckpoint wrote"
        raise Damaged(message, "save-incomplete")
    _require_families(source, parts, options)
    fields = {name: _fields(source, name) for name in parts}
    flat = flat_members(fields)
    skeletons = skeletons_of(fields, parts)
    catalogs = []
    for family in parts.values():
        if family:
            inner = scanned_below(scan_folder, source, family, options, prefix=f"{family}.")
            catalog = apart(placed(relocated(inner, family), skeletons, options), flat)
            catalogs.append(with_prefix(catalog, family))
        else:
            catalog = scan_folder(source, options)
            catalogs.append(apart(placed(catalog, skeletons, options), flat))
    world = max((catalog.world_size or 1 for catalog in catalogs), default=1)
    catalogs += _extra_state(source, options, world)
    version = next((f.get("bytecheckpoint_version") for f in fields.values()), None)
    info = {"writer": "ByteCheckpoint"}
    info |= {"version": version} if isinstance(version, str) else {}
    return replace(together(*catalogs), format="bytecheckpoint", info=info)


def _require_families(source: Source, parts: Mapping[str, str], options: ScanOptions) -> None:
    """Report the families of which there are data files, and no metadata."""
    found = {match[1] for name in source.files if (match := _SHARDS.fullmatch(name))}
    missing = [f"{family}/.metadata" for family in sorted(found.difference(parts.values()))]
    problems = [
        Problem(f"{name} is missing, which names what is beside it", "file-missing", file=name)
        for name in missing
    ]
    options.report(problems, subject=source.root, hint="name the other folder by itself to read it")


def _fields(source: Source, name: str) -> Mapping[str, Any]:
    value = read_pickle(read_metadata(source, name), what=name).value
    if not isinstance(value, Call):
        message = f"{name}: the pickle holds no ByteCheckpoint Metadata"
        raise Damaged(message, "metadata-unreadable", file=name)
    return value.fields


def _extra_state(source: Source, options: ScanOptions, world: int) -> list[Catalog]:
    """What each rank saved for itself, of ``world`` ranks or more; none where there is none."""
    files = {int(m[1]): m.string for m in filter(None, map(_EXTRA.fullmatch, source.files))}
    if not files:
        return []
    require_rank(max(files), _EXTRA.pattern)
    ranks = {
        rank: read_leaves(
            read_torch_file(source, file),
            source,
            prefix=("extra_state",),
            rank_state=True,
            refuse=True,
        )
        for rank, file in sorted(files.items())
    }
    found = assemble(ranks, per_rank=options.per_rank)
    options.report(found.problems, subject="extra_state")
    sizes_ = {file: source.files[file] for file in files.values()}
    notes = (*found.notes, *note_unread(found.objects), *_lost_extra_state(files, world))
    return [
        Catalog(
            "", found.tensors, found.objects, sizes_, len(files), notes=notes,
            conflicts=found.conflicts,
        )
    ]  # fmt: skip


def _lost_extra_state(files: Mapping[int, str], world: int) -> list[Problem]:
    """Every rank writes a file of its own, or none does (ByteCheckpoint)."""
    missing = find_missing_ranks(files, max(world, max(files) + 1))
    if not missing:
        return []
    beside = files[min(files)]
    message = f"the extra state of rank {', '.join(map(str, missing))} is missing beside {beside}"
    return [Problem(message, "rank-missing", file=beside)]


FORMAT = Format(
    "bytecheckpoint",
    "ByteCheckpoint folder (model, optimizer, extra_state)",
    _probe,
    _scan,
)
