"""What differs between two checkpoints: names, shapes and types folded, then what changed most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from ckptool.commands.inspect.fold import TensorLine, fold
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import short_name
from ckptool.core.text import plural, size
from ckptool.render.messages import say, show_lines
from ckptool.render.text import Cell, columns, console, emit
from ckptool.render.verify import show_findings, show_summary_line

if TYPE_CHECKING:
    from ckptool.commands.verify.compare.changes import ChangedModule, ChangedTensor
    from ckptool.commands.verify.compare.diff import DiffReport, DiffSide, TensorPairs

_MOST_LINES = 24
_CHANGE = "change: |B - A| / |A|"


def show_diff(report: DiffReport) -> None:
    """Show both sides, one-sided names, differences, changes, then the summary."""
    screen = console()
    rows = [_side(side, called) for called, side in (("A", report.a), ("B", report.b))]
    emit(screen, columns(screen, rows, "lllrr", cuts=1))
    if report.of_runs:
        say(("  the newest step that both runs have", "dim"))
        show_findings(report.findings)
    for side, entries in (("A", report.only_a), ("B", report.only_b)):
        lines = fold(entries)
        _show(screen, "red" if side == "A" else "green", f"only in {side}", len(entries),
              [_one_sided(line) for line in lines], "llll")  # fmt: skip
    for what, pairs, cells in (
        ("shape differs", report.shapes, _shapes),
        ("type differs", report.types, _types),
    ):
        _show(screen, "yellow", what, len(pairs), _pair_rows(pairs, cells), "llll")
    if not report.of_runs:
        show_findings(report.findings)
    _show_changed(screen, report.changed, report.modules)
    show_summary_line(report.summary, ok=report.ok)
    if report.fit is not None:
        fit = report.fit
        gives = f"gives A {fit.common:,} of the {fit.wanted:,} names in B"
        say(("hint:", "cyan"), f" {fit.option} {gives}")
    elif report.hint is not None:
        say(("hint:", "cyan"), f" {report.hint}")


def _side(side: DiffSide, called: str) -> list[Cell]:
    kind = side.model or side.format or "cannot be read"
    tensors = plural(side.tensors, "tensor")
    return [(called, "dim"), (str(side.path), "bold"), kind, (tensors, "dim"), size(side.nbytes)]


def _show(
    screen: Console,
    color: str,
    what: str,
    count: int,
    rows: Sequence[Sequence[Cell]],
    aligns: str,
    heads: Sequence[str] = (),
) -> None:
    """Show a heading with a count, then the first rows."""
    if not count:
        return
    show_lines([[], [(what, color), f": {plural(count, 'tensor')}"]])
    emit(screen, columns(screen, rows[:_MOST_LINES], aligns, heads=heads, cuts=0))
    if len(rows) > _MOST_LINES:
        say((f"  and {len(rows) - _MOST_LINES:,} more lines; --json lists all", "dim"))


def _one_sided(line: TensorLine) -> list[Cell]:
    return [line.name, *_looks(line.entry), _count(line)]


def _looks(entry: TensorEntry) -> tuple[Cell, Cell]:
    return (str(list(entry.shape)), "green"), (short_name(entry.dtype.name), "yellow")


def _count(line: TensorLine) -> Cell:
    return f"x{line.count}" if line.count > 1 else "", "bold"


def _pair_rows(
    pairs: Iterable[TensorPairs], cells: Callable[[TensorPairs], tuple[Cell, Cell]]
) -> list[list[Cell]]:
    """Return one row for similar pairs whose names differ only in numbers."""
    groups: dict[object, list[TensorPairs]] = {}
    for pair in pairs:
        looks = (pair.a.shape, pair.b.shape, pair.a.dtype, pair.b.dtype)
        groups.setdefault(looks, []).append(pair)
    rows: list[list[Cell]] = []
    for members in groups.values():
        lines = fold([pair.a for pair in members])
        rows += [[line.name, *cells(members[0]), _count(line)] for line in lines]
    return rows


def _shapes(pair: TensorPairs) -> tuple[Cell, Cell]:
    return (f"A {list(pair.a.shape)}", "green"), (f"B {list(pair.b.shape)}", "green")


def _types(pair: TensorPairs) -> tuple[Cell, Cell]:
    names = (short_name(entry.dtype.name) for entry in (pair.a, pair.b))
    return tuple((f"{side} {name}", "yellow") for side, name in zip("AB", names, strict=True))  # type: ignore[return-value]


def _show_changed(
    screen: Console, changed: Sequence[ChangedTensor], modules: Sequence[ChangedModule]
) -> None:
    """Show the modules and then the tensors that changed, largest change first."""
    rows: list[list[Cell]] = [
        [m.module, _relative(m.relative), f"{m.changed:,}", f"{m.tensors:,}"] for m in modules
    ]
    if len(modules) > 1:
        by_module = ("module", "change", "tensors", "of")
        _show(
            screen,
            "yellow",
            f"changed by module ({_CHANGE})",
            len(changed),
            rows,
            "lrrr",
            by_module,
        )
    rows = [
        [
            (change.tensor.name, "bold"),
            _relative(change.relative),
            f"{change.tensor.differing:,}",
            f"{change.tensor.elements:,}",
            _largest(change.tensor.largest),
        ]
        for change in changed
    ]
    heads = ("tensor", "change", "differ", "of", "largest")
    what = f"changed ({_CHANGE}; largest: |b - a| of one element)"
    _show(screen, "yellow", what, len(changed), rows, "lrrrr", heads)


def _relative(value: float | None) -> Cell:
    """Return the norm of the change relative to the norm of what was there; NaN is marked."""
    if value is not None and math.isnan(value):
        return "NaN", "bold reverse red"
    return "-" if value is None else f"{value:.3g}", "red"


def _largest(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
