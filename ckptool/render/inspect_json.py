"""What a checkpoint holds, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptool.commands.inspect import InspectReport
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.quantised import kinds
from ckptool.formats._values import type_name
from ckptool.render.legend import spots
from ckptool.render.listing import matching, tensor_named
from ckptool.render.ranks import loads_of
from ckptool.render.values import Inexact, plain


def inspect_json(
    report: InspectReport,
    *,
    tensors: Sequence[str] = (),
    ranks: bool = False,
    map_name: str | None = None,
) -> dict[str, Any]:
    """The report as ``ckptool.inspect/1``; ``value`` is left out where JSON cannot hold it.

    With globs only the ``tensors`` that match; ``ranks`` and ``map`` only where asked for.
    """
    catalog = report.catalog
    names = matching(catalog, tensors) if tensors else catalog.tensors
    more: dict[str, Any] = {"ranks": _ranks_json(catalog)} if ranks else {}
    if map_name is not None:
        more["map"] = _map_json(tensor_named(catalog, map_name))
    return {
        "schema": "ckptool.inspect/1",
        "path": str(report.path),
        "format": catalog.format,
        "info": dict(catalog.info),
        "quantised": kinds(catalog),
        "step": report.step,
        "world_size": catalog.world_size,
        "mesh": _mesh_json(catalog),
        "totals": {
            "tensors": report.totals.tensors,
            "parameters": report.totals.parameters,
            "bytes": report.totals.nbytes,
            "files": report.totals.files,
        },
        "tensors": [_tensor_json(catalog.tensors[name]) for name in names],
        "objects": [_object_json(entry) for entry in catalog.objects.values()],
        "notes": list(report.notes),
        "problems": list(report.problems),
        **more,
    }


def _mesh_json(catalog: Catalog) -> dict[str, Any] | None:
    mesh = catalog.mesh
    if mesh is None:
        return None
    names = None if mesh.names is None else list(mesh.names)
    return {"shape": list(mesh.shape), "names": names, "source": catalog.mesh_source}


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    placements = entry.placements
    return {
        "name": entry.name,
        "dtype": entry.dtype.name,
        "shape": list(entry.shape),
        "nbytes": entry.nbytes,
        "placements": None if placements is None else list(map(str, placements)),
        "chunks": len(entry.chunks),
    }


def _object_json(entry: ObjectEntry) -> dict[str, Any]:
    described = {"name": entry.name, "type": type_name(entry.value)}
    try:
        return described | {"value": plain(entry.value)}
    except Inexact:
        return described


def _ranks_json(catalog: Catalog) -> list[dict[str, int]]:
    loads, _ = loads_of(catalog)
    return [{"rank": r, "chunks": n, "nbytes": held} for r, (n, held) in sorted(loads.items())]


def _map_json(entry: TensorEntry) -> list[dict[str, Any]]:
    """Every box of a tensor, replicas included: which rank and file holds it, and where."""
    return [
        {
            "rank": spot.rank,
            "file": spot.at.file,
            "offset": spot.at.offset,
            "nbytes": spot.nbytes,
            "from": list(spot.box.lo),
            "to": list(spot.box.hi),
        }
        for spot in spots(entry)
    ]
