"""What each rank of a device mesh would hold of a checkpoint, and what decides it."""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.reshard.families import in_families
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.mesh import Mesh
from ckptool.core.sharding.placement import Choice, PlacedTensors, Placer
from ckptool.formats import FORMATS
from ckptool.formats.base import Format


class MeshHoldings(Struct, frozen=True):
    """The placements of tensors on a mesh, and what each of its ranks holds then.

    ``loads`` are the numbers of tensors, and their bytes, by rank.
    """

    mesh: Mesh
    choices: dict[str, Choice]
    placed: PlacedTensors
    loads: tuple[tuple[int, int], ...]

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Return the bytes of tensor data that each rank holds."""
        return tuple(nbytes for _, nbytes in self.loads)


def hold(catalog: Catalog, placer: Placer, writer: Format) -> MeshHoldings:
    """Place tensors on a mesh as a format asks for it. Raises as ``Placer.choose`` does."""
    mesh = _with_names(placer.mesh, catalog.mesh)
    placer = replace(placer, mesh=mesh, rules=(*placer.rules, *writer.loading.rules()))
    choices = placer.choose(catalog)
    placed = PlacedTensors(mesh, {name: choice.placements for name, choice in choices.items()})
    return MeshHoldings(mesh, choices, placed, _loads(catalog, placed))


def hold_by_default(opened: OpenedCheckpoint, mesh: Mesh) -> MeshHoldings:
    """Place the tensors of a checkpoint on a mesh as ``reshard`` does without further options."""
    writer = own_writer(opened)
    return hold(in_families(opened.catalog, writer.writing.families), Placer(mesh), writer)


def own_writer(opened: OpenedCheckpoint) -> Format:
    """Return the format that a checkpoint is resharded to: its own if that is cut for a mesh."""
    if opened.catalog.format == "rank-local":
        from ckptool.formats.rank_files import WRITERS

        if (writer := WRITERS.get(opened.catalog.info.get("writer", ""))) is not None:
            return FORMATS[writer]
    return FORMATS["dcp"] if opened.format.writing.reshard is None else opened.format


def _with_names(mesh: Mesh, source: Mesh | None) -> Mesh:
    """Return the mesh with the names of the source's dims if it is unnamed and has as many dims.

    A trainer that finds its mesh dims by name, as verl does, loads no others.
    """
    if mesh.names is not None or source is None or len(source.shape) != len(mesh.shape):
        return mesh
    return replace(mesh, names=source.names)


def _loads(catalog: Catalog, placed: PlacedTensors) -> tuple[tuple[int, int], ...]:
    loads = [(0, 0)] * placed.mesh.size
    groups: dict[object, list[TensorEntry]] = defaultdict(list)
    for entry in catalog.tensors.values():
        groups[entry.shape, placed.placements[entry.name], entry.dtype].append(entry)
    for members in groups.values():
        for position, shard in enumerate(placed.shards(members[0])):
            tensors, nbytes = loads[position]
            elements = sum(piece.box.volume for piece in shard.pieces)
            size = elements * members[0].dtype.itemsize * len(members)
            loads[position] = tensors + len(members) * bool(elements), nbytes + size
    return tuple(loads)
