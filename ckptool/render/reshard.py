"""What a reshard did, or would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ckptool.render.convert import show_files
from ckptool.render.moves import moves_json, show_moves
from ckptool.render.text import columns, console, emit, free, plural, size, visible

if TYPE_CHECKING:
    from ckptool.commands.reshard.reshard import Costs, LoadCost, ReshardReport
    from ckptool.core.mesh import Mesh
    from ckptool.core.sharding.placement import Choice


def show_reshard(report: ReshardReport, costs: Costs | None) -> None:
    """A few lines for the whole; for a dry run (with load costs) also every choice and file."""
    dry_run = costs is not None
    screen = console()
    verb = "would write" if dry_run else "wrote"
    lines = [
        Text.assemble(
            f"{verb} ",
            (visible(str(report.target)), "bold"),
            f" ({report.target_format}) for mesh ",
            (visible(mesh_text(report.mesh)), "bold"),
            f": {plural(len(report.choices), 'tensor')}, {plural(report.objects, 'value')},"
            f" {size(report.write_bytes)} in {plural(len(report.files), 'file')}",
        ),
        *map(Text, _reasons(report)),
        Text(_ranks(report)),
    ]
    if costs is not None:
        lines += [Text(line) for line in _costs(report, costs)]
    emit(screen, lines)
    if dry_run:
        if report.map is not None:
            show_moves(report.map, screen)
        emit(
            screen,
            columns(screen, [_chosen(*one) for one in report.choices.items()], "lll", cuts=0),
        )
        show_files(report.files, screen)


def _costs(report: ReshardReport, costs: Costs) -> list[str]:
    return [
        f"  reads {size(costs.read_bytes)} ({over_read(report, costs):.2f} x the tensors'"
        f" size), writes {size(report.write_bytes)}{free(report.free_bytes)};"
        f" memory: {size(report.peak_memory)} of {size(report.budget)}",
        f"  to load, per rank: {_loading(costs.from_target)}",
        f"  to load from the source, per rank: {_loading(costs.from_source)}",
    ]


def _chosen(name: str, choice: Choice) -> list[Text]:
    placed = ", ".join(map(str, choice.placements))
    return [
        Text(f"  {visible(name)}"),
        Text(placed, style="magenta"),
        Text(f"({visible(choice.reason)})", style="dim"),
    ]


def mesh_text(mesh: Mesh) -> str:
    """``dp=2,tp=4``, or ``2x4`` where the dims have no names."""
    if mesh.names is None:
        return "x".join(map(str, mesh.shape))
    return ",".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.shape, strict=True))


def _reasons(report: ReshardReport) -> list[str]:
    counts = Counter(
        (", ".join(map(str, choice.placements)), choice.reason)
        for choice in report.choices.values()
    )
    return [
        f"  {count:>6,} x {placements}  ({visible(reason)})"
        for (placements, reason), count in counts.most_common(8)
    ]


def _loading(costs: tuple[LoadCost, ...]) -> str:
    files = [cost.files for cost in costs]
    nbytes = [cost.nbytes for cost in costs]
    opened = plural(max(files), "file")
    opened = opened if min(files) == max(files) else f"{min(files):,} to {opened}"
    return f"{opened}, {_from_to(nbytes)}"


def _from_to(nbytes: Sequence[int]) -> str:
    """The least and the most of some sizes, once where they are the same."""
    least, most = size(min(nbytes)), size(max(nbytes))
    return most if least == most else f"{least} to {most}"


def over_read(report: ReshardReport, costs: Costs) -> float:
    """Bytes that are read from the source's files for each byte of its tensors."""
    return costs.read_bytes / max(1, report.read_bytes)


def _ranks(report: ReshardReport) -> str:
    mean = sum(report.rank_bytes) / len(report.rank_bytes)
    most = max(report.rank_bytes)
    over = f", largest {most / mean - 1:.1%} above the mean" if mean and most > mean else ""
    return f"  per rank: {_from_to(report.rank_bytes)}{over}"


def reshard_json(report: ReshardReport, costs: Costs | None) -> dict[str, Any]:
    """The report as ``ckptool.reshard/1``; for a dry run with what loading will cost."""
    names = list(report.mesh.names) if report.mesh.names else None
    return {
        "schema": "ckptool.reshard/1",
        "source": {"path": str(report.source), "format": report.source_format},
        "target": {"path": str(report.target), "format": report.target_format},
        "mesh": {"shape": list(report.mesh.shape), "names": names},
        "written": costs is None,
        "totals": {
            "tensors": len(report.choices),
            "objects": report.objects,
            "read_bytes": report.read_bytes if costs is None else costs.read_bytes,
            "over_read": None if costs is None else over_read(report, costs),
            "write_bytes": report.write_bytes,
            "free_bytes": report.free_bytes,
            "peak_memory": report.peak_memory,
            "budget": report.budget,
        },
        "tensors": [
            {"name": name, "placements": list(map(str, c.placements)), "reason": c.reason}
            for name, c in report.choices.items()
        ],
        "map": moves_json(report.map),
        "rank_bytes": list(report.rank_bytes),
        "load": None
        if costs is None
        else {
            "source": _load_json(costs.from_source),
            "target": _load_json(costs.from_target),
        },
        "files": [
            {"path": file.path, "nbytes": file.nbytes, "rank": file.rank} for file in report.files
        ],
        "notes": list(report.notes),
    }


def _load_json(costs: tuple[LoadCost, ...]) -> list[dict[str, int]]:
    return [{"files": cost.files, "nbytes": cost.nbytes} for cost in costs]
