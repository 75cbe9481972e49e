"""What a checkpoint holds, as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect import InspectReport
from ckptool.render.inspect_json import inspect_json
from ckptool.render.listing import tensor_lines, value_lines
from ckptool.render.mapping import map_lines
from ckptool.render.overview import overview
from ckptool.render.ranks import rank_lines
from ckptool.render.stats import stats_json, stats_lines
from ckptool.render.text import console as standard_console
from ckptool.render.text import emit, plural, size

if TYPE_CHECKING:
    from ckptool.commands.stats import TensorStats

__all__ = ["inspect_json", "show", "stats_json"]


def show(
    report: InspectReport,
    console: Console,
    *,
    tensors: Sequence[str] = (),
    ranks: bool = False,
    values: bool = False,
    map_name: str | None = None,
    stats: Sequence[TensorStats] = (),
) -> None:
    """Print the whole picture, or only the views that are asked for."""
    views = list(_views(report, console, tensors, ranks, values, map_name))
    if stats:
        views.insert(0, stats_lines(stats, console))
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
