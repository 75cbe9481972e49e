"""The result or plan of a reshard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.fold import fold
from ckptool.core.text import free, plural, size, visible
from ckptool.render.convert import compares, planned_part, rewriting_lines, show_files, show_moves
from ckptool.render.inspect.listing import ROOMY, line_name, placements_text
from ckptool.render.text import Cell, columns, console, emit, first_lines

if TYPE_CHECKING:
    from ckptool.commands.reshard.reshard import Costs, LoadCost, ReshardReport
    from ckptool.core.mesh import Mesh
    from ckptool.core.sharding.placement import Choice


def show_reshard(report: ReshardReport) -> None:
    """Show a summary; for a dry run, with load costs, also every choice and file."""
    screen = console()
    costs = report.costs
    verb = "wrote" if report.written else "would write"
    lines = [
        Text.assemble(
            f"{verb} ",
            (visible(str(report.target)), "bold"),
            f" ({report.target_format}) for mesh ",
            (visible(mesh_text(report.mesh)), "bold"),
            f": {plural(len(report.choices), 'tensor')}, {plural(report.objects, 'value')},"
            f" {size(report.write_bytes)} in {plural(len(report.files), 'file')}",
        ),
        *map(Text, rewriting_lines(report)),
        *map(Text, _reasons(report)),
        Text(_ranks(report)),
    ]
    if costs is None:
        emit(screen, lines)
        return
    emit(screen, [*lines, *map(Text, [*_costs(report, costs), *planned_part(report)])])
    if report.map is not None:
        show_moves(report.map, screen)
    emit(screen, first_lines(screen, _choices(report, screen)))
    show_files(report.files, screen)


def _choices(report: ReshardReport, screen: Console) -> list[Text]:
    """Return a line per tensor, folded as inspect does; reasons only where they differ."""
    brief = screen.is_terminal and screen.width < ROOMY
    differ = len({choice.reason for choice in report.choices.values()}) > 1
    lines = fold(report.entries.values(), lambda entry: report.choices[entry.name])
    rows: list[list[Cell]] = []
    for line in lines:
        choice = report.choices[line.entry.name]
        rows.append(
            [
                Text("  ") + line_name(line, brief),
                (placements_text(choice.placements, brief), "magenta"),
                (f"({choice.reason})" if differ else "", "dim"),
                (f"x{line.count}" if line.count > 1 else "", "bold"),
            ]
        )
    return columns(screen, rows, "lllr", cuts=0)


def _costs(report: ReshardReport, costs: Costs) -> list[str]:
    return [
        f"  reads {size(costs.read_bytes)} ({report.over_read:.2f} x the tensors'"
        f" size), writes {size(report.write_bytes)}{free(report.free_bytes)}{compares(report)};"
        f" memory: {size(report.peak_memory)} of {size(report.budget)}",
        f"  to load, per rank: {_loading(costs.from_target)}",
        f"  to load from the source, per rank: {_loading(costs.from_source)}",
    ]


def _placed(choice: Choice) -> str:
    return ", ".join(map(str, choice.placements))


def mesh_text(mesh: Mesh) -> str:
    """Return ``dp=2,tp=4``, or ``2x4`` if the dims have no names."""
    if mesh.names is None:
        return "x".join(map(str, mesh.shape))
    return ",".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.shape, strict=True))


def _reasons(report: ReshardReport) -> list[str]:
    counts = Counter((_placed(choice), choice.reason) for choice in report.choices.values())
    return [
        f"  {count:>6,} x {placed}  ({visible(reason)})"
        for (placed, reason), count in counts.most_common(8)
    ]


def _loading(costs: tuple[LoadCost, ...]) -> str:
    files = [cost.files for cost in costs]
    nbytes = [cost.nbytes for cost in costs]
    opened = plural(max(files), "file")
    opened = opened if min(files) == max(files) else f"{min(files):,} to {opened}"
    return f"{opened}, {_from_to(nbytes)}"


def _from_to(nbytes: Sequence[int]) -> str:
    """Return the smallest and the largest of some sizes, once if they are equal."""
    least, most = size(min(nbytes)), size(max(nbytes))
    return most if least == most else f"{least} to {most}"


def _ranks(report: ReshardReport) -> str:
    mean = sum(report.rank_bytes) / len(report.rank_bytes)
    most = max(report.rank_bytes)
    over = f", largest {most / mean - 1:.1%} above the mean" if mean and most > mean else ""
    return f"  per rank: {_from_to(report.rank_bytes)}{over}"
