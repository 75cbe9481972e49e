"""What a checkpoint holds, on the screen, as JSON and as an exported picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.document import plain
from ckptool.commands.inspect.report import InspectReport
from ckptool.commands.options.inspect import OVERVIEW, InspectOptions
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.selection import is_used, select, tensors_named
from ckptool.core.text import plural
from ckptool.errors import UsageError
from ckptool.render.inspect.listing import (
    in_order,
    metadata_lines,
    stats_lines,
    tensor_lines,
    value_lines,
)
from ckptool.render.inspect.overview import (
    loads_of,
    mesh_lines,
    module_lines,
    overview,
    rank_lines,
    sorted_modules,
)
from ckptool.render.inspect.shards import chunk_locations, shard_lines
from ckptool.render.text import console as standard_console
from ckptool.render.text import emit, size

if TYPE_CHECKING:
    from ckptool.commands.inspect.stats import TensorStats
    from ckptool.commands.reshard.holdings import MeshHoldings


def show(
    report: InspectReport,
    console: Console,
    options: InspectOptions = OVERVIEW,
    held: MeshHoldings | None = None,
    stats: Sequence[TensorStats] = (),
) -> None:
    """Print the whole overview, or only the requested views."""
    catalog, sort = report.catalog, options.sort
    views = [stats_lines(stats, console)] if len(stats) else []  # a report with NaN is false
    if options.depth is not None:
        views.append(module_lines(report, options.depth, console, sort))
    of_tensors, of_values = _apart(catalog, options.tensors)
    if of_tensors:
        views.append(tensor_lines(catalog, of_tensors, console, sort))
    if of_values:
        views.append(value_lines(select(catalog, of_values), console))
    if options.shards is not None:
        views.append(shard_lines(catalog, options.shards, console))
    if options.rank_bytes:
        views.append(rank_lines(catalog, console))
    if held is not None:
        views.append(mesh_lines(held, console))
    if options.values and not of_values:
        views.append([*value_lines(catalog, console), *metadata_lines(catalog, console)])
    if not views:
        views.append(overview(report, console, sort))
    emit(console, [line for view in views for line in (*view, Text())][:-1])


def _apart(catalog: Catalog, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part what names tensors, or nothing, from what names values alone, or is a value's name."""

    def is_of_values(pattern: str) -> bool:
        if pattern in catalog.objects or pattern in catalog.tensors:
            return pattern not in catalog.tensors
        return not is_used(pattern, catalog.tensors) and is_used(pattern, catalog.objects)

    values = [*filter(is_of_values, patterns)]
    return [pattern for pattern in patterns if pattern not in values], values


def show_traffic(report: InspectReport) -> None:
    """Show how much was requested from a store, and read; on stderr."""
    text = "no store requests: the checkpoint is on a local disk"
    if report.traffic is not None:
        read = size(report.traffic.received)
        text = f"{plural(report.traffic.requests, 'request')}, {read} read"
    standard_console(stderr=True).print(text, highlight=False)


def inspect_json(
    report: InspectReport,
    options: InspectOptions = OVERVIEW,
    held: MeshHoldings | None = None,
    *,
    is_table: bool = False,
) -> dict[str, Any]:
    """Return the report as ``ckptool.inspect/2``; ``value`` is omitted if JSON cannot hold it.

    With globs only the ``tensors`` that match, in the checkpoint's order unless they are sorted by
    size, or for a table; ``rank_bytes``, ``shards``, ``modules`` and ``holdings`` only on request.
    """
    catalog, sort = report.catalog, options.sort
    of_tensors, _ = _apart(catalog, options.tensors)
    names = tensors_named(catalog, of_tensors, "NAME") if options.tensors else catalog.tensors
    entries = [catalog.tensors[name] for name in names]
    as_stored = sort == "name" and not is_table
    content = report.to_dict(entries if as_stored else in_order(entries, sort))
    if options.depth is not None:
        content["modules"] = plain(sorted_modules(report, options.depth, sort))
    if options.rank_bytes:
        loads = sorted(loads_of(catalog)[0].items())
        content["rank_bytes"] = [{"rank": r, "chunks": n, "bytes": size} for r, (n, size) in loads]
    if held is not None:
        rows = enumerate(held.loads)
        content["holdings"] = [{"rank": r, "tensors": n, "bytes": size} for r, (n, size) in rows]
    if options.shards is not None:
        wanted = tensors_named(catalog, [options.shards], "--shards")
        content["shards"] = [row for n in wanted for row in _shards_json(catalog.tensors[n])]
    return content


def _shards_json(entry: TensorEntry) -> list[dict[str, Any]]:
    """List every box of a tensor, including replicas: its rank, file and place."""
    return [
        {
            "tensor": entry.name,
            "rank": each.rank,
            "file": each.at.file,
            "offset": each.at.offset,
            "bytes": each.nbytes,
            "from": list(each.box.lo),
            "to": list(each.box.hi),
        }
        for each in chunk_locations(entry)
    ]


EXPORT_MARK = b'<svg class="rich-terminal"'
"""The beginning of every exported screen."""


def require_exportable(path: Path) -> None:
    """Raise UsageError if the suffix of ``path`` is not that of SVG."""
    if path.suffix != ".svg":
        hint = f"--html {path} writes a page" if path.suffix in (".html", ".htm") else None
        raise UsageError(f"--export {path}: file name must end in .svg", hint=hint)


def export_screen(screen: Console) -> bytes:
    """Return what ``screen`` recorded as SVG."""
    return screen.export_svg(title="ckptool").encode()
