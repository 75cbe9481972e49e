"""ByteCheckpoint folders: ``model/``, ``optimizer/`` and ``extra_state/`` of one step.

Read: ByteCheckpoint 0.0.2 (its DDP, FSDP and FSDP2 checkpointers). Each of the first two is laid
out as DCP does, but an item is a tensor's bare bytes; how they are strided is in ``.metadata``, a
pickle inside the pickle. The family begins each name. FSDP's decomposed form keeps flat
parameters, and in ``.metadata`` what they are made of: they are taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptool.core.catalog import Catalog
from ckptool.core.rewrite import with_prefix
from ckptool.errors import Damaged, Problem
from ckptool.formats import _pickle, dcp
from ckptool.formats._assemble import assemble
from ckptool.formats._bytecheckpoint_flat import apart, flat_members
from ckptool.formats._bytecheckpoint_places import placed, skeletons_of
from ckptool.formats._leaves import read_leaves
from ckptool.formats._pickle import Call
from ckptool.formats._relocate import relocated, scanned_below, together
from ckptool.formats._torch_file import read_torch_file
from ckptool.formats.base import (
    Format,
    ScanOptions,
    Source,
    first_missing,
    read_metadata,
    require_rank,
)
from ckptool.formats.torch_save import unread_notes

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
        raise Damaged(Problem(message, "save-unfinished"))
    _require_families(source, parts, options)
    fields = {name: _fields(source, name) for name in parts}
    flat = flat_members(fields)
    skeletons = skeletons_of(fields, parts)
    catalogs = []
    for family in parts.values():
        if family:
            inner = scanned_below(dcp.scan_folder, source, family, options, prefix=f"{family}.")
            catalog = apart(placed(relocated(inner, family), skeletons, options), flat)
            catalogs.append(with_prefix(catalog, family))
        else:
            catalog = dcp.scan_folder(source, options)
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
    value = _pickle.load(read_metadata(source, name), what=name).value
    if not isinstance(value, Call):
        message = f"{name}: the pickle holds no ByteCheckpoint Metadata"
        raise Damaged(Problem(message, "metadata-unreadable", file=name))
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
    notes = (*found.notes, *unread_notes(found.objects), *_lost_extra_state(files, world))
    return [
        Catalog(
            "", found.tensors, found.objects, sizes_, len(files), notes=notes,
            conflicts=found.conflicts,
        )
    ]  # fmt: skip


def _lost_extra_state(files: Mapping[int, str], world: int) -> list[Problem]:
    """Every rank writes a file of its own, or none does (ByteCheckpoint)."""
    missing = first_missing(files, max(world, max(files) + 1))
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
