"""A folder that accelerate saved from FSDP with DCP: a family of files in each subfolder.

``pytorch_model_fsdp_0/`` and ``optimizer_0/`` are DCP folders (accelerate 1.15); scheduler, sampler
and random states lie beside them. The family begins each name, unless all names begin with it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckptool.core.catalog import Catalog, Chunk, Copy, Item, Place, TensorEntry
from ckptool.core.rewrite import with_prefix
from ckptool.errors import Problem
from ckptool.formats import dcp, rank_local
from ckptool.formats.base import Format, ScanOptions, Source

_PART = re.compile(
    r"(?P<folder>(?P<family>pytorch_model_fsdp|optimizer)_(?P<number>\d+))/\.metadata"
)
_FAMILIES = {"pytorch_model_fsdp": "model", "optimizer": "optimizer"}


def _parts(source: Source) -> dict[str, str]:
    """Subfolder to family, the model first."""
    found = {}
    for match in filter(None, map(_PART.fullmatch, sorted(source.files, reverse=True))):
        number = "" if match["number"] == "0" else f"_{match['number']}"
        found[match["folder"]] = _FAMILIES[match["family"]] + number
    return found


def _probe(source: Source) -> bool:
    return bool(_parts(source))


def _scan(source: Source, options: ScanOptions) -> Catalog:
    catalogs = [
        _relocated(_in_family(_scanned(source, folder, options), family), folder)
        for folder, family in _parts(source).items()
    ]
    if rank_local.FORMAT.probe(source):
        catalogs.append(rank_local.FORMAT.scan(source, options))
    first = catalogs[0]
    return replace(
        first,
        format="accelerate",
        tensors={n: entry for catalog in catalogs for n, entry in catalog.tensors.items()},
        objects={n: entry for catalog in catalogs for n, entry in catalog.objects.items()},
        files={n: size for catalog in catalogs for n, size in catalog.files.items()},
        world_size=max(catalog.world_size or 1 for catalog in catalogs),
        info={"writer": "accelerate (by its file names)"},
        notes=tuple(note for catalog in catalogs for note in catalog.notes),
        conflicts={n: why for catalog in catalogs for n, why in catalog.conflicts.items()},
        companions={n: size for catalog in catalogs for n, size in catalog.companions.items()},
        archives=tuple(at for catalog in catalogs for at in catalog.archives),
        named={file: found for catalog in catalogs for file, found in catalog.named.items()},
    )


def _scanned(source: Source, folder: str, options: ScanOptions) -> Catalog:
    """The catalog of one DCP folder; what is noted on the way names files as seen from above."""
    found: list[Problem] | None = None if options.found is None else []
    catalog = dcp.FORMAT.scan(source.narrowed(folder), replace(options, found=found))
    for problem in found or ():
        problem.file = f"{folder}/{problem.file}" if problem.file else folder
    if options.found is not None:
        options.found.extend(found or ())
    return catalog


def _in_family(catalog: Catalog, family: str) -> Catalog:
    if all(name.startswith(f"{family}.") for name in (*catalog.tensors, *catalog.objects)):
        return catalog
    return with_prefix(catalog, family)


def _relocated(catalog: Catalog, folder: str) -> Catalog:
    """The catalog of a subfolder, seen from the folder above."""
    tensors = {name: _moved(entry, folder) for name, entry in catalog.tensors.items()}
    files = {f"{folder}/{name}": size for name, size in catalog.files.items()}
    archives = tuple(replace(at, file=f"{folder}/{at.file}") for at in catalog.archives)
    named = {f"{folder}/{name}": found for name, found in catalog.named.items()}
    return replace(catalog, tensors=tensors, files=files, archives=archives, named=named)


def _moved(entry: TensorEntry, folder: str) -> TensorEntry:
    chunks = tuple(
        Chunk(
            chunk.box,
            _moved_place(chunk.at, folder),
            chunk.rank,
            tuple(Copy(_moved_place(copy.at, folder), copy.rank) for copy in chunk.copies),
        )
        for chunk in entry.chunks
    )
    return replace(entry, chunks=chunks)


def _moved_place(at: Place, folder: str) -> Place:
    if isinstance(at, Item):
        return replace(at, file=f"{folder}/{at.file}")
    moved = replace(at, file=f"{folder}/{at.file}")
    record = getattr(moved, "record", None)
    if record is None:
        return moved
    return replace(moved, record=record._replace(file=f"{folder}/{record.file}"))


FORMAT = Format(
    "accelerate",
    "accelerate's FSDP folder: DCP subfolders for model and optimizer",
    _probe,
    _scan,
    locate=dcp.FORMAT.locate,
)
