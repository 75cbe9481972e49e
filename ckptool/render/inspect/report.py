"""What a checkpoint holds, on the screen and as an exported picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.report import InspectReport
from ckptool.commands.inspect.views import split_patterns
from ckptool.commands.options.inspect import OVERVIEW, InspectOptions
from ckptool.core.selection import select
from ckptool.errors import UsageError
from ckptool.render.inspect.listing import (
    metadata_lines,
    stats_lines,
    tensor_lines,
    value_lines,
)
from ckptool.render.inspect.overview import (
    mesh_lines,
    module_lines,
    overview,
    rank_lines,
)
from ckptool.render.inspect.shards import shard_lines
from ckptool.render.text import emit

if TYPE_CHECKING:
    from ckptool.commands.inspect.stats import TensorStats
    from ckptool.commands.reshard.holdings import MeshHoldings


def show(
    report: InspectReport,
    console: Console,
    options: InspectOptions = OVERVIEW,
    holdings: MeshHoldings | None = None,
    stats: Sequence[TensorStats] = (),
) -> None:
    """Print the whole overview, or only the requested views."""
    catalog, sort = report.catalog, options.sort
    views = [stats_lines(stats, console)] if len(stats) else []  # a report with NaN is false
    if options.depth is not None:
        views.append(module_lines(report, options.depth, console, sort))
    of_tensors, of_values = split_patterns(catalog, options.tensors)
    if of_tensors:
        views.append(tensor_lines(catalog, of_tensors, console, sort))
    if of_values:
        views.append(value_lines(select(catalog, of_values), console))
    if options.shards is not None:
        views.append(shard_lines(catalog, options.shards, console))
    if options.rank_bytes:
        views.append(rank_lines(catalog, console))
    if holdings is not None:
        views.append(mesh_lines(holdings, console))
    if options.values and not of_values:
        views.append([*value_lines(catalog, console), *metadata_lines(catalog, console)])
    if not views:
        views.append(overview(report, console, sort))
    emit(console, [line for view in views for line in (*view, Text())][:-1])


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
