"""Bars of blocked, background and durable time: on the terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.bench.report import BenchReport, Measured
from ckptool.commands.bench.words import seconds
from ckptool.core.text import plural, size, visible
from ckptool.errors import Unsupported, UsageError
from ckptool.render.text import columns

_BLOCKED, _BACKGROUND, _SYNCING = "#e0605a", "#5fafff", "#b9b4d0"
_NAMES = {_BLOCKED: "training blocked", _BACKGROUND: "until written", _SYNCING: "until durable"}
_SHADES, _ASCII = "█▓░", "#=-"
_NARROWEST, _WIDEST = 10, 40
_BESIDE, _LOADS = 36, 24
"""Cells of a line besides the name and the bar, and those of loads where there is room for them."""

_INCHES_PER_BAR = 0.34


def rate(value: float) -> str:
    """Return a rate as ``1.2 GiB/s``."""
    return f"{size(int(value))}/s"


def draw_bars(report: BenchReport, screen: Console) -> list[Text]:
    """Draw a bar per strategy: blocked, written, durable, each as a share of the limits."""
    shades = _SHADES if screen.encoding.startswith("utf") else _ASCII
    legend = Text("  ")
    for shade, (color, name) in zip(shades, _NAMES.items(), strict=True):
        legend.append(shade, color).append(f" {name}  ")
    staging = "pinned" if report.limits.get("device_to_host_pinned") else "memory"
    writing = "upload" if report.limits.get("upload") else "write"
    heads = ("", "", f"of {staging} copy", f"of raw {writing}", f"load, of {staging} copy")
    rows = [[Text(head, "dim") for head in heads]]
    room = _room(report, screen)
    loads = room >= _NARROWEST + _LOADS
    width = max(_NARROWEST, min(_WIDEST, room - _LOADS if loads else room))
    for result in report.ranked:
        fractions = [report.fraction(time, result) for time in ("blocked", "durable", "loaded")]
        cells = [Text("" if value is None else f"{value:.0%}") for value in fractions]
        rows.append(
            [Text(f"  {visible(result.name)}"), _bar(report, result, width, shades), *cells]
        )
    legend.rstrip()
    rows = rows if loads else [row[:-1] for row in rows]
    return [legend, *columns(screen, rows, "llrrr" if loads else "llrr", cuts=0)]


def _room(report: BenchReport, screen: Console) -> int:
    """Return the cells that names and fractions leave of the terminal's width."""
    if not screen.is_terminal:
        return _WIDEST + _LOADS
    names = max(len(visible(result.name)) for result in report.results)
    return screen.width - names - _BESIDE


def _bar(report: BenchReport, result: Measured, width: int, shades: str) -> Text:
    longest = max(result.durable_median for result in report.results)
    text = Text()
    for end, shade, color in zip(_parts(result), shades, _NAMES, strict=True):
        cells = max(1, round(end / longest * width)) - len(text)
        text.append(shade * cells, color)
    return text


def _parts(result: Measured) -> tuple[float, float, float]:
    """Return where each color of a bar ends; a commit that blocks may end last, as blocked."""
    durable = result.durable_median
    blocked = min(result.blocked_median, durable)
    return blocked, min(max(result.written_median, blocked), durable), durable


def require_plottable(path: Path) -> None:
    """Check, before anything is measured, that the picture can be drawn; make its folder.

    Raises UsageError for another suffix, Unsupported with a file in the way, or without
    matplotlib.
    """
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot {path}: the file must end in .svg or .png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unsupported(f"{path.parent}: cannot be made: {error.strerror}") from None
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Unsupported("--plot needs matplotlib", hint="pip install 'ckptool[plot]'") from None


def write_plot(report: BenchReport, path: Path) -> None:
    """Draw the bars into an SVG or PNG file; Unsupported if it cannot be written."""
    from matplotlib.figure import Figure

    results = report.ranked[::-1]
    figure = Figure(figsize=(10, 1.9 + _INCHES_PER_BAR * len(results)), layout="constrained")
    axes = figure.add_subplot()
    for place, result in enumerate(results):
        _draw(axes, place, result, best=result is report.best)
    labels = [r.name if r.is_consistent else f"{r.name}  (DIRTY)" for r in results]
    axes.set_yticks(range(len(results)), labels)
    axes.set_xlabel("seconds after the call (median of the steady saves)")
    axes.set_title(_title(report), loc="left", fontsize=10)
    if limit := report.limit("durable"):
        raw = report.settings.nbytes / limit
        label = "raw upload" if report.limits.get("upload") else "raw write and fsync"
        axes.axvline(raw, color="#555555", linestyle="--", linewidth=1, label=label)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.4 * max(result.durable_median for result in results))
    axes.set_ylim(-0.6, len(results) - 0.4)
    handles, names = axes.get_legend_handles_labels()
    legend = dict(zip(names, handles, strict=True))  # each name once
    look: dict[str, Any] = {"ncols": 4, "frameon": False, "fontsize": 9}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", **look)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise Unsupported(f"{path}: cannot be written: {error.strerror}") from None


def _draw(axes: Any, place: int, result: Measured, *, best: bool) -> None:
    """Draw one bar, followed by the seconds."""
    blocked, durable = result.blocked_median, result.durable_median
    alpha = 1.0 if result.is_consistent else 0.45
    begin = 0.0
    for end, (color, name) in zip(_parts(result), _NAMES.items(), strict=True):
        look = {"height": 0.62, "color": color, "alpha": alpha}
        axes.barh(place, end - begin, left=begin, label=name, **look)
        begin = end
    words = f" {seconds(blocked)} blocked, {seconds(durable)} until durable"
    axes.text(durable, place, words, va="center", fontsize=8, weight="bold" if best else "normal")


def _title(report: BenchReport) -> str:
    s = report.settings
    ranks = plural(s.ranks, f"{'CPU' if s.device == 'cpu' else s.device} rank")
    return f"Saving {size(s.nbytes)} from {ranks}, torch {report.versions['torch']}"
