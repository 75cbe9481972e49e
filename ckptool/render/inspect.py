"""What a checkpoint holds: the picture, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect import InspectReport
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.quantised import kinds
from ckptool.formats._values import type_name
from ckptool.render.listing import tensor_lines, value_lines
from ckptool.render.mapping import map_lines
from ckptool.render.overview import overview
from ckptool.render.ranks import rank_lines
from ckptool.render.stats import show_stats, stats_json
from ckptool.render.text import console as standard_console
from ckptool.render.text import emit, plural, size
from ckptool.render.values import Inexact, plain

__all__ = ["inspect_json", "show", "show_stats", "stats_json"]


def show(
    report: InspectReport,
    console: Console,
    *,
    tensors: Sequence[str] = (),
    ranks: bool = False,
    values: bool = False,
    map_name: str | None = None,
) -> None:
    """Print the whole picture, or only the views that are asked for."""
    views = list(_views(report, console, tensors, ranks, values, map_name))
    if not views:
        emit(console, overview(report, console))
        return
    blank = [Text()]
    emit(console, [line for view in views for line in (*view, *blank)][:-1])


def _views(
    report: InspectReport,
    console: Console,
    tensors: Sequence[str],
    ranks: bool,
    values: bool,
    map_name: str | None,
) -> Iterable[list[Text]]:
    if tensors:
        yield tensor_lines(report.catalog, tensors, console)
    if map_name is not None:
        yield map_lines(report.catalog, map_name, console)
    if ranks:
        yield rank_lines(report.catalog, console)
    if values:
        yield value_lines(report.catalog, console)


def show_traffic(report: InspectReport) -> None:
    """What was asked of a store, and what came; on stderr."""
    said = "nothing was asked of a store: the checkpoint lies on a disk"
    if report.traffic is not None:
        read = size(report.traffic.received)
        said = f"{plural(report.traffic.requests, 'request')}, {read} read"
    standard_console(stderr=True).print(said, highlight=False)


def inspect_json(report: InspectReport) -> dict[str, Any]:
    """The report as ``ckptool.inspect/1``; ``value`` is left out where JSON cannot hold it."""
    catalog = report.catalog
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
        "tensors": [_tensor_json(entry) for entry in catalog.tensors.values()],
        "objects": [_object_json(entry) for entry in catalog.objects.values()],
        "notes": list(report.notes),
        "problems": list(report.problems),
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
