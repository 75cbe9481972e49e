"""TorchSnapshot folders: ``.snapshot_metadata`` and the files its manifest names.

Read: torchsnapshot 0.1.0 and the head of its repository (df45917d, which adds DTensors). Tensors
lie as raw little-endian bytes, by themselves or in batched slabs, or as torch.save archives, as
quantised ones do (the serializers that the package has for those are used by none of its writers).
Tensors that are neither replicated nor sharded belong to one rank: where there are several ranks,
the rank is the first step of their names, as it is in the manifest, and so it is for values that
differ between ranks. Version 0.1.0 stores bfloat16 tensors with an odd number of elements one
short; they are refused as damaged.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptool.core.catalog import (
    Catalog,
)
from ckptool.errors import Damaged, Problem
from ckptool.formats._infer import with_inferred_mesh
from ckptool.formats._snapshot_manifest import (
    METADATA,
    Manifest,
    read_manifest,
)
from ckptool.formats._snapshot_places import Places
from ckptool.formats._snapshot_read import Reader
from ckptool.formats.base import Format, ScanOptions, Source
from ckptool.formats.torch_save import unread_notes

_DATA = re.compile(r"(replicated|sharded|batched|[0-9]{1,9})/.+")
_SURE = ("replicated/", "sharded/", "batched/")


def _probe(source: Source) -> bool:
    return METADATA in source.files or _is_uncommitted(source)


def _is_uncommitted(source: Source) -> bool:
    """Whether all files lie as those of a snapshot do whose metadata was never written."""
    return any(name.startswith(_SURE) for name in source.files) and all(
        map(_DATA.fullmatch, source.files)
    )


def _scan(source: Source, options: ScanOptions) -> Catalog:
    if METADATA not in source.files:
        message = f"{source.root}: no {METADATA}, which a snapshot gets once all its data is there"
        raise Damaged(Problem(message, "save-unfinished", file=METADATA))
    manifest = read_manifest(source)
    reader = Reader(Places(source), manifest)
    for logical, held in manifest.leaves():
        try:
            reader.read(logical, held)
        except (TypeError, ValueError):
            message = f"{logical}: lies in a container that is not as TorchSnapshot writes it"
            reader.problems.append(Problem(message, "metadata-unreadable", file=METADATA))
    options.report(reader.problems, subject=source.root)
    return with_inferred_mesh(_catalog(source, manifest, reader))


def _catalog(source: Source, manifest: Manifest, reader: Reader) -> Catalog:
    meshes = [entry.mesh for entry in reader.tensors.values() if entry.mesh is not None]
    full = [mesh for mesh in meshes if mesh.size == manifest.world_size]
    mesh = max(full, key=lambda one: len(one.shape), default=None)
    return Catalog(
        "torchsnapshot",
        reader.tensors,
        reader.objects,
        {name: source.files[name] for name in (METADATA, *sorted(reader.places.used))},
        world_size=manifest.world_size,
        mesh=mesh,
        mesh_source="declared" if mesh else None,
        conflicts=reader.conflicts,
        info={"writer": "TorchSnapshot", "version": manifest.version},
        bare=frozenset(reader.places.used - reader.places.archives),
        notes=(
            *dict.fromkeys([*reader.notes, *unread_notes(reader.objects)]),
            *_unnamed(source, reader.places.used),
        ),
    )


def _unnamed(source: Source, used: Collection[str]) -> list[Problem]:
    """A note of data files, which have no suffix, that the manifest does not name."""
    names = [name for name in source.files if _DATA.fullmatch(name) and name not in used]
    if not names:
        return []
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    message = f"not read: {names[0]}{more}, which {METADATA} does not name"
    return [Problem(message, "file-extra", file=names[0])]


FORMAT = Format("torchsnapshot", "TorchSnapshot folder (.snapshot_metadata)", _probe, _scan)
