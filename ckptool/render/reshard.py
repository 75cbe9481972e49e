"""The result or plan of a reshard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptool.core.text import free, plural, size
from ckptool.render.convert import compares, planned_part, rewriting_lines
from ckptool.render.messages import Line, show_lines

if TYPE_CHECKING:
    from ckptool.commands.reshard.reshard import Costs, LoadCost, ReshardReport
    from ckptool.core.mesh import Mesh
    from ckptool.core.sharding.placement import Choice


def show_reshard(report: ReshardReport) -> None:
    """Show a summary; for a dry run, with load costs, also every choice and file."""
    costs = report.costs
    verb = "wrote" if report.written else "would write"
    lines: list[Line] = [
        [
            f"{verb} ",
            (str(report.target), "bold"),
            f" ({report.target_format}) for mesh ",
            (mesh_text(report.mesh), "bold"),
            f": {plural(len(report.choices), 'tensor')}, {plural(report.objects, 'value')},"
            f" {size(report.write_bytes)} in {plural(len(report.files), 'file')}",
        ]
    ]
    more = [*rewriting_lines(report), *_reasons(report), _ranks(report)]
    if costs is not None:
        more += [*_costs(report, costs), *planned_part(report)]
    show_lines([*lines, *([line] for line in more)])
    if costs is None:
        return
    from ckptool.render.plan import show_choices, show_files, show_moves

    if report.map is not None:
        show_moves(report.map)
    show_choices(report)
    show_files(report.files)


def _costs(report: ReshardReport, costs: Costs) -> list[str]:
    return [
        f"  reads {size(costs.read_bytes)} ({report.over_read:.2f} x the tensors'"
        f" size), writes {size(report.write_bytes)}{free(report.free_bytes)}{compares(report)};"
        f" memory: {size(report.peak_memory)} of {size(report.budget)}",
        f"  to load, per rank: {_loading(costs.from_target)}",
        f"  to load from the source, per rank: {_loading(costs.from_source)}",
    ]


def _describe(choice: Choice) -> str:
    return ", ".join(map(str, choice.placements))


def mesh_text(mesh: Mesh) -> str:
    """Return ``dp=2,tp=4``, or ``2x4`` if the dims have no names."""
    if mesh.names is None:
        return "x".join(map(str, mesh.shape))
    return ",".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.shape, strict=True))


def _reasons(report: ReshardReport) -> list[str]:
    counts = Counter((_describe(choice), choice.reason) for choice in report.choices.values())
    return [
        f"  {count:>6,} x {placed}  ({reason})" for (placed, reason), count in counts.most_common(8)
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
    excess = f", largest {most / mean - 1:.1%} above the mean" if mean and most > mean else ""
    return f"  per rank: {_from_to(report.rank_bytes)}{excess}"
