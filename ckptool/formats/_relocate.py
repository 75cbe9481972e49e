"""Catalogs of subfolders, seen from the folder above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptool.core.catalog import Catalog, Extent, Place, Scaled, TensorEntry
from ckptool.errors import Problem
from ckptool.formats.base import ScanOptions, Source


def relocated(catalog: Catalog, folder: str) -> Catalog:
    """The catalog of a subfolder, with paths of files relative to the folder above."""
    tensors = {name: _moved(entry, folder) for name, entry in catalog.tensors.items()}
    files = {f"{folder}/{name}": size for name, size in catalog.files.items()}
    archives = tuple(replace(at, file=f"{folder}/{at.file}") for at in catalog.archives)
    named = {f"{folder}/{name}": found for name, found in catalog.named.items()}
    copies, bare = (
        frozenset(f"{folder}/{name}" for name in names) for names in (catalog.copies, catalog.bare)
    )
    return replace(
        catalog,
        tensors=tensors,
        files=files,
        copies=copies,
        bare=bare,
        archives=archives,
        named=named,
    )


Scan = Callable[[Source, ScanOptions], Catalog]


def scanned_below(
    scan: Scan, source: Source, folder: str, options: ScanOptions, *, prefix: str = ""
) -> Catalog:
    """The catalog of a subfolder; what is noted on the way names files as seen from above.

    ``prefix`` is what tensors' names will begin with, and do in what is noted.
    """
    found: list[Problem] | None = None if options.found is None else []
    catalog = scan(source.narrowed(folder), replace(options, found=found))
    for problem in found or ():
        problem.file = f"{folder}/{problem.file}" if problem.file else folder
        problem.tensor = prefix + problem.tensor if problem.tensor else None
    if options.found is not None:
        options.found.extend(found or ())
    return catalog


def _moved(entry: TensorEntry, folder: str) -> TensorEntry:
    chunks = tuple(
        replace(
            chunk,
            at=_moved_place(chunk.at, folder),
            copies=tuple(replace(copy, at=_moved_place(copy.at, folder)) for copy in chunk.copies),
        )
        for chunk in entry.chunks
    )
    return replace(entry, chunks=chunks)


def _moved_place(at: Place, folder: str) -> Place:
    if isinstance(at, Scaled):
        return replace(at, values=_moved(at.values, folder), scales=_moved(at.scales, folder))
    file = f"{folder}/{at.file}"
    if isinstance(at, Extent) and at.record is not None:
        return replace(at, file=file, record=at.record._replace(file=file))
    return replace(at, file=file)


def together(first: Catalog, *others: Catalog) -> Catalog:
    """The first catalog with the tensors, values, files and notes of all of them."""
    catalogs = (first, *others)
    return replace(
        first,
        tensors={n: entry for catalog in catalogs for n, entry in catalog.tensors.items()},
        objects={n: entry for catalog in catalogs for n, entry in catalog.objects.items()},
        files={n: size for catalog in catalogs for n, size in catalog.files.items()},
        world_size=max(catalog.world_size or 1 for catalog in catalogs),
        notes=tuple(dict.fromkeys(note for catalog in catalogs for note in catalog.notes)),
        conflicts={n: why for catalog in catalogs for n, why in catalog.conflicts.items()},
        companions={n: size for catalog in catalogs for n, size in catalog.companions.items()},
        copies=frozenset(name for catalog in catalogs for name in catalog.copies),
        bare=frozenset(name for catalog in catalogs for name in catalog.bare),
        archives=tuple(at for catalog in catalogs for at in catalog.archives),
        named={file: found for catalog in catalogs for file, found in catalog.named.items()},
    )
