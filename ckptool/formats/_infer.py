"""Fill in the mesh and placements that a format does not record."""

from __future__ import annotations

from dataclasses import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.infer import Stored, infer


def with_inferred_mesh(catalog: Catalog) -> Catalog:
    """The catalog with the mesh and placements that its chunks and writing ranks determine.

    A tensor without elements gets none: its chunks cannot tell how it was placed.
    """
    world = catalog.world_size or 1
    stored = [_stored(entry) for entry in catalog.tensors.values() if entry.placements is None]
    if world < 2 or not stored or catalog.mesh is not None:
        return catalog
    found = infer(stored, world)
    notes = catalog.notes
    if found.ambiguous:
        shapes = " or ".join("x".join(map(str, shape)) for shape in found.ambiguous)
        notes = (*notes, f"the device mesh is ambiguous: {shapes} explain the chunks alike")
    tensors = {
        name: replace(entry, placements=found.placements.get(name, entry.placements))
        if entry.elements
        else entry
        for name, entry in catalog.tensors.items()
    }
    return replace(
        catalog,
        tensors=tensors,
        mesh=found.mesh,
        mesh_source="inferred" if found.mesh else None,
        notes=notes,
    )


def _stored(entry: TensorEntry) -> Stored:
    chunks = tuple((chunk.box, chunk.rank) for chunk in entry.chunks)
    copies = tuple((chunk.box, copy.rank) for chunk in entry.chunks for copy in chunk.copies)
    return Stored(entry.name, entry.shape, chunks + copies)
