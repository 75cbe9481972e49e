"""TorchSnapshot folders: ``.snapshot_metadata`` and the files its manifest names.

Read: torchsnapshot 0.1.0 and the head of its repository (df45917d, which adds DTensors). Tensors
lie as raw little-endian bytes, by themselves or in batched slabs, or as torch.save archives, as
quantized ones do (the serializers that the package has for those are used by none of its writers).
Tensors that are neither replicated nor sharded belong to one rank: where there are several ranks,
the rank is the first step of their names, as it is in the manifest, and so it is for values that
differ between ranks. Version 0.1.0 stores bfloat16 tensors with an odd number of elements one
short; they are refused as damaged.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    ObjectEntry,
    Path,
    TensorEntry,
    flat_name,
    merge_copies,
)
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard
from ckptool.core.selection import with_prefix
from ckptool.core.text import list_some
from ckptool.errors import Damaged, Problem, Refusal, SourceError, Unsupported, refused
from ckptool.formats.base import Detection, Format, Reading, ScanOptions
from ckptool.formats.torchsnapshot.manifest import (
    CONTAINERS,
    METADATA,
    QUANTIZED,
    SHARDED,
    VALUES,
    Fields,
    Manifest,
    Places,
    element_type,
    read_manifest,
)
from ckptool.serialization.archive.fields import read_flat_ints
from ckptool.serialization.archive.quantized import INTEGERS, describe_quantized, split_quantized
from ckptool.serialization.archive.tensors import read_sizes
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled, Leaf, read_leaves
from ckptool.serialization.state_dict.values import refuse_unread, same_value

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, struct.error)
"""The errors of a manifest entry that lacks something, or has it in another form."""


class _Reader(Struct):
    """Turns the entries of a manifest into tensors and values."""

    places: Places
    manifest: Manifest
    contents: Assembled = field(default_factory=Assembled)

    def read(self, logical: str, entries: dict[int, Fields]) -> None:
        """Read one logical path, with the entry of each rank that has one.

        An entry that cannot or must not be read becomes a conflict by its name.
        """
        sharded = {rank: entry for rank, entry in entries.items() if entry["type"] in SHARDED}
        if sharded:
            work = partial(self._read_shards, logical, sharded)
            self.contents.add(self._read_or_refuse(logical, min(sharded), work))
        rest = {rank: entry for rank, entry in entries.items() if rank not in sharded}
        shared = next((rank for rank, entry in rest.items() if entry.get("replicated")), None)
        if shared is not None:
            rest = {shared: rest[shared]}
        parts = {
            rank: self._read_or_refuse(logical, rank, partial(self._of_rank, logical, rank, entry))
            for rank, entry in rest.items()
        }
        is_one = shared is not None or self.manifest.world_size == 1
        if is_one or _are_equal([*parts.values()]):
            parts = {rank: parts[rank] for rank in [*parts][:1]}
        else:
            parts = {rank: _of_a_rank(part, str(rank)) for rank, part in parts.items()}
        for part in parts.values():
            self.contents.add(part)

    def _read_or_refuse(self, logical: str, rank: int, work: Callable[[], Assembled]) -> Assembled:
        """Return what ``work`` reads at a path, or why that is refused."""
        name = flat_name(self.manifest.path(logical, rank))
        try:
            return work()
        except (SourceError, Unsupported) as error:
            why = error.message
        except _MALFORMED:
            message = "an entry that is not as TorchSnapshot writes it"
            why = Problem(message, "metadata-unreadable", file=METADATA)
        refusal = Refusal(f"{name}: {why}", why.code, file=why.file, tensor=name)
        return Assembled(conflicts={name: refusal})

    def _of_rank(self, logical: str, rank: int, entry: Fields) -> Assembled:
        """Read one rank's entry at a path."""
        path = self.manifest.path(logical, rank)
        kind = entry["type"]
        if kind in ("Tensor", "ChunkedTensor"):
            return self._tensor(path, rank, entry)
        if kind == "object":
            return self._object(path, entry)
        if kind in CONTAINERS:
            value: Any = [] if kind == "list" else {}
        elif kind in VALUES:
            value = VALUES[kind](entry["serialized_value"])
        else:
            raise Damaged(f"an entry of the unknown type {kind!r:.40}", "metadata-unreadable")
        name = flat_name(path)
        return Assembled(objects={name: ObjectEntry(name, path, value)})

    def _tensor(self, path: Path, rank: int, entry: Fields) -> Assembled:
        shape = read_sizes(entry["shape"])
        shard = {"offsets": [0] * len(shape), "sizes": shape, "tensor": entry}
        shards = entry.get("chunks", [shard])
        chunks = self.places.chunks(rank, shards)
        if not shape:
            chunks = [replace(chunk, box=Box((), ())) for chunk in chunks]
        return self._entry(path, shards, shape, chunks)

    def _read_shards(self, logical: str, entries: dict[int, Fields]) -> Assembled:
        """Read a ShardedTensor or DTensor: the shards of all ranks that have some."""
        shards = [shard for entry in entries.values() for shard in entry["shards"]]
        if not shards:
            raise Damaged("a sharded tensor without a shard", "chunk-gap")
        chunks = [
            c for rank, entry in entries.items() for c in self.places.chunks(rank, entry["shards"])
        ]
        shape = tuple(max(ends) for ends in zip(*(c.box.hi for c in chunks), strict=True))
        path = self.manifest.path(logical, min(entries))
        contents = self._entry(path, shards, shape, chunks)
        _add_mesh(contents, next(iter(entries.values())))
        return contents

    def _entry(
        self, path: Path, shards: list[Fields], shape: tuple[int, ...], chunks: list[Chunk]
    ) -> Assembled:
        """Return the tensor of some shards; a refusal if its kind is unsupported."""
        type_name = shards[0]["tensor"]["dtype"] if shards else "no shards"
        dtype, parameters = element_type(type_name), Assembled()
        if type_name in QUANTIZED and chunks:
            quantization = self._parameters(path, shards)
            parameters, dtype = quantization or parameters, dtype if quantization else None
        if dtype is None or not chunks:
            reason = f"not a plain tensor, but {type_name}"
            refusal = refuse_unread(flat_name(path), reason)
            return Assembled(conflicts={flat_name(path): refusal})
        full = (*path, INTEGERS) if type_name in QUANTIZED else path
        name = flat_name(full)
        notes = describe_quantized({name, *parameters.tensors, *parameters.objects})
        entry = TensorEntry(name, full, dtype, shape, merge_copies(chunks))
        return Assembled({name: entry} | parameters.tensors, parameters.objects, notes)

    def _parameters(self, path: Path, shards: list[Fields]) -> Assembled | None:
        """Read the scales and zero points of a quantized tensor; None if its shards differ."""
        opened = [self.places.open(shard["tensor"]) for shard in shards]
        parts: list[dict[Any, Any]] = [split_quantized(file.value) or {} for file in opened]
        rest = [{n: part for n, part in group.items() if n != INTEGERS} for group in parts]
        if len(rest) > 1 and not all(_are_numbers(item) and item == rest[0] for item in rest):
            return None
        leaves = read_leaves(replace(opened[0], inert=rest[0]), self.places.source, prefix=path)
        parameters = assemble({0: leaves})
        if parameters.refusals:
            raise refused([*parameters.refusals.values()], subject=flat_name(path))
        return parameters if leaves else None

    def _object(self, path: Path, entry: Fields) -> Assembled:
        """Read a value that torch.save wrote; tensors in it become separate tensors."""
        opened = self.places.open(entry)
        leaves = read_leaves(opened, self.places.source, prefix=path)
        return assemble({0: leaves or {flat_name(path): Leaf(path, {})}})


def _are_numbers(parameters: Mapping[str, Any]) -> bool:
    return all(type(value) in (int, float) for value in parameters.values())


def _are_equal(of_ranks: list[Assembled]) -> bool:
    """Return whether all ranks have the same values at a path, and nothing that may be a tensor."""
    first, *rest = of_ranks or [Assembled()]
    return not any(map(_may_hold_tensor, of_ranks)) and all(
        other.objects.keys() == first.objects.keys()
        and other.conflicts.keys() == first.conflicts.keys()
        and all(same_value(item.value, other.objects[n].value) for n, item in first.objects.items())
        for other in rest
    )


def _may_hold_tensor(contents: Assembled) -> bool:
    refusals = contents.refusals.values()
    return bool(contents.tensors) or any(why.may_be_tensor for why in refusals)


def _of_a_rank(contents: Assembled, rank: str) -> Assembled:
    """Return what one of several ranks has, under names that begin with it."""
    bare = Catalog("", contents.tensors, contents.objects, {}, conflicts=contents.conflicts)
    full = with_prefix(bare, rank)
    return replace(contents, tensors=full.tensors, objects=full.objects, conflicts=full.conflicts)


def _add_mesh(contents: Assembled, entry: Fields) -> None:
    """Add the mesh and placements that the entry of a DTensor records."""
    if entry["type"] != "DTensor":
        return
    mesh = _mesh(entry["mesh"])
    by_dim = [read_flat_ints([dim for dim in dims if dim != -1]) for dims in entry["dim_map"]]
    if any(len(by_dim) != len(tensor.shape) for tensor in contents.tensors.values()):
        raise Damaged(f"a dim_map of {len(by_dim)} dims", "metadata-unreadable")
    if any(mesh_dim >= len(mesh.shape) for mesh_dims in by_dim for mesh_dim in mesh_dims):
        raise Damaged(f"a dim_map beyond a mesh of {len(mesh.shape)} dims", "metadata-unreadable")
    placements: list[Placement] = []
    for mesh_dim in range(len(mesh.shape)):
        dims = [dim for dim, mesh_dims in enumerate(by_dim) if mesh_dim in mesh_dims]
        placements.append(Shard(dims[0]) if dims else Replicate())
    for name, tensor in contents.tensors.items():
        contents.tensors[name] = replace(tensor, mesh=mesh, placements=tuple(placements))


def _mesh(nested: Any) -> Mesh:
    shape = []
    inner = nested
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0]
    return Mesh(tuple(shape), None, read_flat_ints(nested))


_DATA = re.compile(r"(replicated|sharded|batched|[0-9]{1,9})/.+")
_SURE = ("replicated/", "sharded/", "batched/")


def _is_uncommitted(source: Source) -> bool:
    """Return whether all files are placed like those of a snapshot without its metadata.

    DCP leaves safetensors shards in a folder of such a name until they are consolidated.
    """
    return any(
        name.startswith(_SURE) and not name.endswith(".safetensors") for name in source.files
    ) and all(map(_DATA.fullmatch, source.files))


def _scan(source: Source, options: ScanOptions) -> Catalog:
    if METADATA not in source.files:
        message = f"{source.root}: no {METADATA}, which is written once all data is"
        raise Damaged(message, "save-incomplete", file=METADATA)
    manifest = read_manifest(source)
    reader = _Reader(Places(source), manifest)
    for logical, entries in manifest.leaves():
        try:
            reader.read(logical, entries)
        except (TypeError, ValueError):
            message = f"{logical}: lies in a container that is not as TorchSnapshot writes it"
            problem = Problem(message, "metadata-unreadable", file=METADATA)
            reader.contents.problems.append(problem)
    options.report(reader.contents.problems, subject=source.root)
    return options.with_placements(_catalog(source, manifest, reader))


def _catalog(source: Source, manifest: Manifest, reader: _Reader) -> Catalog:
    contents, used = reader.contents, reader.places.used
    meshes = [entry.mesh for entry in contents.tensors.values() if entry.mesh is not None]
    full = [mesh for mesh in meshes if mesh.size == manifest.world_size]
    mesh = max(full, key=lambda mesh: len(mesh.shape), default=None)
    contents.notes += _unlisted_files(source, used)
    return contents.catalog(
        "torchsnapshot",
        source,
        [METADATA, *sorted(used)],
        world_size=manifest.world_size,
        mesh=mesh,
        mesh_source="declared" if mesh else None,
        info={"writer": "TorchSnapshot", "version": manifest.version},
        bare=frozenset(used - reader.places.archives),
    )


def _unlisted_files(source: Source, used: Collection[str]) -> list[Problem]:
    """Return one note on data files, which have no suffix, that the manifest does not list."""
    names = [name for name in source.files if _DATA.fullmatch(name) and name not in used]
    if not names:
        return []
    message = f"not read: {list_some(names, 1)}, not listed in {METADATA}"
    return [Problem(message, "file-unused", file=names[0])]


FORMAT = Format(
    "torchsnapshot",
    "TorchSnapshot folder (.snapshot_metadata)",
    Detection(lambda source: METADATA in source.files or _is_uncommitted(source)),
    Reading(_scan),
)
