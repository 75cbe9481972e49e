"""What a checkpoint holds, on the screen, as JSON and as an exported picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.document import document
from ckptool.commands.inspect import InspectReport
from ckptool.core.catalog import ObjectEntry, TensorEntry
from ckptool.core.quantization import kinds
from ckptool.core.text import plural
from ckptool.errors import UsageError
from ckptool.render.inspect.listing import (
    matching,
    stats_lines,
    tensor_lines,
    tensor_named,
    value_lines,
)
from ckptool.render.inspect.overview import loads_of, overview, rank_lines
from ckptool.render.inspect.shards import chunk_locations, shard_lines
from ckptool.render.inspect.values import Inexact, plain
from ckptool.render.text import console as standard_console
from ckptool.render.text import emit, size
from ckptool.serialization.state_dict.values import type_name

if TYPE_CHECKING:
    from ckptool.commands.stats import TensorStats


def show(
    report: InspectReport,
    console: Console,
    *,
    tensors: Sequence[str] = (),
    ranks: bool = False,
    values: bool = False,
    shards: str | None = None,
    stats: Sequence[TensorStats] = (),
) -> None:
    """Print the whole picture, or only the views that are asked for."""
    catalog = report.catalog
    views = [stats_lines(stats, console)] if stats else []
    if tensors:
        views.append(tensor_lines(catalog, tensors, console))
    if shards is not None:
        views.append(shard_lines(catalog, shards, console))
    if ranks:
        views.append(rank_lines(catalog, console))
    if values:
        views.append(value_lines(catalog, console))
    if not views:
        views.append(overview(report, console))
    emit(console, [line for view in views for line in (*view, Text())][:-1])


def show_traffic(report: InspectReport) -> None:
    """Show how much was requested from a store, and read; on stderr."""
    text = "no store requests: the checkpoint is on a local disk"
    if report.traffic is not None:
        read = size(report.traffic.received)
        text = f"{plural(report.traffic.requests, 'request')}, {read} read"
    standard_console(stderr=True).print(text, highlight=False)


def inspect_json(
    report: InspectReport,
    *,
    tensors: Sequence[str] = (),
    ranks: bool = False,
    shards: str | None = None,
) -> dict[str, Any]:
    """Return the report as ``ckptool.inspect/2``; ``value`` is left out where JSON cannot hold it.

    With globs only the ``tensors`` that match; ``ranks`` and ``map`` only where asked for.
    """
    catalog = report.catalog
    names = matching(catalog, tensors) if tensors else catalog.tensors
    more: dict[str, Any] = {}
    if ranks:
        loads = sorted(loads_of(catalog)[0].items())
        more["ranks"] = [{"rank": r, "chunks": n, "bytes": size} for r, (n, size) in loads]
    if shards is not None:
        more["map"] = _map_json(tensor_named(catalog, shards))
    mesh: dict[str, Any] | None = None
    if catalog.mesh is not None:
        mesh = {"shape": catalog.mesh.shape, "names": catalog.mesh.names}
        mesh["source"] = catalog.mesh_source
    content = {
        "path": report.path,
        "format": catalog.format,
        "info": catalog.info,
        "quantized": kinds(catalog),
        "step": report.step,
        "world_size": catalog.world_size,
        "mesh": mesh,
        "totals": report.totals,
        "tensors": [_tensor_json(catalog.tensors[name]) for name in names],
        "values": [_object_json(entry) for entry in catalog.objects.values()],
        "notes": report.notes,
        "problems": report.problems,
    }
    return document("inspect", **content, **more)


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    placements = entry.placements
    return {
        "name": entry.name,
        "dtype": entry.dtype.name,
        "shape": entry.shape,
        "bytes": entry.nbytes,
        "placements": None if placements is None else list(map(str, placements)),
        "chunks": len(entry.chunks),
    }


def _object_json(entry: ObjectEntry) -> dict[str, Any]:
    described = {"name": entry.name, "type": type_name(entry.value)}
    try:
        return described | {"value": plain(entry.value)}
    except Inexact:
        return described


def _map_json(entry: TensorEntry) -> list[dict[str, Any]]:
    """List every box of a tensor, replicas included: which rank and file holds it, and where."""
    return [
        {
            "rank": each.rank,
            "file": each.at.file,
            "offset": each.at.offset,
            "bytes": each.nbytes,
            "from": list(each.box.lo),
            "to": list(each.box.hi),
        }
        for each in chunk_locations(entry)
    ]


_HTML = b'<!DOCTYPE html>\n<html>\n<head>\n<meta charset="UTF-8">\n<style>\n'


def require_exportable(path: Path) -> None:
    """Raise UsageError where the suffix of ``path`` is neither of SVG nor of HTML."""
    if path.suffix not in (".svg", ".html"):
        raise UsageError(f"--export {path}: file name must end in .svg or .html")


def export_screen(screen: Console, path: Path) -> bytes:
    """Return what ``screen`` recorded as SVG or HTML, by the suffix of ``path``."""
    svg = path.suffix == ".svg"
    text = screen.export_svg(title="ckptool") if svg else screen.export_html(inline_styles=True)
    return text.encode()


def export_mark(path: Path) -> bytes:
    """Return how every export begins that has the suffix of ``path``."""
    return b'<svg class="rich-terminal"' if path.suffix == ".svg" else _HTML
