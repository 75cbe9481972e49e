"""Megatron-core's ShardedObjects and common state, under the names a person knows them by.

A ShardedObject is a bytes item ``{key}/shard_{offsets}_{shape}`` that holds a list of one value
(megatron-core 0.12 to 0.20; before, the last size may be missing). The common state is
``common.pt`` up to 0.16 and the ShardedObject ``common_state`` from 0.20 on.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, TensorEntry, flat_name
from ckptool.errors import Damaged, Problem, damaged
from ckptool.formats._assemble import assemble
from ckptool.formats._leaves import read_leaves
from ckptool.formats._torch_file import read_torch_file
from ckptool.formats._tree import leaves, unique_names
from ckptool.formats.base import ScanOptions, Source

COMMON = "common.pt"
_SHARD = re.compile(r"(.+)/shard_([0-9]+(?:\.[0-9]+)*)(?:_([0-9.]*))?")
_STATE = "common_state"


def with_plain_names(catalog: Catalog) -> Catalog:
    """The catalog with ShardedObjects unwrapped and named ``key``, or ``key.offset.offset``."""
    tensors, objects = {}, {}
    for tensor in catalog.tensors.values():
        path = _plain(tensor.path)
        tensors[flat_name(path)] = replace(tensor, name=flat_name(path), path=path)
    for entry in catalog.objects.values():
        for found in _unwrapped(entry):
            objects[found.name] = found
    if len(tensors) < len(catalog.tensors) or tensors.keys() & objects.keys():
        raise Damaged(
            Problem(
                "two ShardedObjects, or one and a tensor, have the same key and offset",
                "items-overlap",
            )
        )
    return replace(catalog, tensors=tensors, objects=objects)


def _plain(path: Path) -> Path:
    """A path without the shard's grid, and without the list of one around the value."""
    match = _SHARD.fullmatch(str(path[0]))
    if match is None:
        return path
    inner = path[2:] if len(path) > 1 and isinstance(path[1], Index) else path[1:]
    if match[1] == _STATE:
        return inner
    sizes = [int(size) for size in (match[3] or "").split(".") if size]
    whole = all(size == 1 for size in sizes)
    return (match[1] if whole else f"{match[1]}.{match[2]}", *inner)


def _unwrapped(entry: ObjectEntry) -> list[ObjectEntry]:
    path = _plain(entry.path)
    value = entry.value
    if len(entry.path) == 1 and _SHARD.fullmatch(str(entry.path[0])):
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if path:
        return [ObjectEntry(flat_name(path), path, value)]
    named = unique_names(leaves(value, what=entry.name, pickled=1 << 20))
    return [ObjectEntry(name, path, leaf) for name, (path, leaf) in named.items()]


def require_common(source: Source, catalog: Catalog, options: ScanOptions) -> None:
    """Report common state that is nowhere: every save has it, as a file or as a ShardedObject.

    ``catalog`` still has the names of the checkpoint.
    """
    paths = [entry.path for entry in catalog.objects.values()]
    paths += [entry.path for entry in catalog.tensors.values()]
    paths += [(name,) for name in catalog.conflicts]
    if COMMON in source.files or any(str(path[0]).startswith(f"{_STATE}/") for path in paths):
        return
    message = (
        f"{COMMON} is missing, with which Megatron keeps arguments, step and the optimizer's groups"
    )
    options.report(
        [Problem(message, "file-missing", file=COMMON)],
        subject=source.root,
        hint="verify --salvage writes the tensors, which are elsewhere",
    )


def with_common(source: Source, catalog: Catalog) -> Catalog:
    """The catalog with the values and tensors of ``common.pt``."""
    if COMMON not in source.files:
        return catalog
    found = assemble({0: read_leaves(read_torch_file(source, COMMON), source, refuse=True)})
    if found.problems:
        raise damaged(found.problems, subject=COMMON)
    twice = found.objects.keys() & catalog.objects.keys()
    if twice:
        raise Damaged(
            Problem(f"{COMMON}: {sorted(twice)[0]!r} is a ShardedObject, too", "items-overlap")
        )
    tensors: dict[str, TensorEntry] = catalog.tensors | found.tensors
    files = catalog.files | {COMMON: source.files[COMMON]}
    return replace(
        catalog,
        tensors=tensors,
        objects=catalog.objects | found.objects,
        conflicts=catalog.conflicts | found.conflicts,
        files=files,
    )
