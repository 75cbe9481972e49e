"""What a reshard did, or would do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ckptool.commands.load_cost import LoadCost
from ckptool.commands.reshard import Costs, ReshardReport
from ckptool.core.mesh import Mesh
from ckptool.render.convert import show_files
from ckptool.render.moves import moves_json, show_moves
from ckptool.render.text import console, escaped, free, size


def show_reshard(report: ReshardReport, costs: Costs | None) -> None:
    """A few lines for the whole; for a dry run (with load costs) also every choice and file."""
    dry_run = costs is not None
    screen = console()
    verb = "would write" if dry_run else "wrote"
    lines = [
        f"{verb} [bold]{escaped(str(report.target))}[/] ({report.target_format}) for mesh"
        f" [bold]{mesh_text(report.mesh)}[/]: {len(report.choices):,} tensors, {report.objects:,}"
        f" values, {size(report.write_bytes)} in {len(report.files):,} files",
        *_reasons(report),
        _ranks(report),
    ]
    if costs is not None:
        lines += [
            f"  reads {size(costs.read_bytes)} ({over_read(report, costs):.2f} x what the tensors"
            f" hold), writes {size(report.write_bytes)}"
            f"{free(report.free_bytes)}; {size(report.peak_memory)} of"
            f" memory where {size(report.budget)} is allowed",
            f"  to load it, a rank opens and reads {_loading(costs.from_target)}",
            f"  from the source it would be {_loading(costs.from_source)}",
        ]
    for line in lines:
        screen.print(line, highlight=False, soft_wrap=True)
    if dry_run:
        if report.map is not None:
            show_moves(report.map, screen)
        for name, choice in report.choices.items():
            placed = ", ".join(map(str, choice.placements))
            screen.print(f"    {escaped(name)}  {placed}  ({choice.reason})", soft_wrap=True)
        show_files(report.files, screen)


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
        f"  {count:>6,} x {placements}  ({escaped(reason)})"
        for (placements, reason), count in counts.most_common(8)
    ]


def _loading(costs: tuple[LoadCost, ...]) -> str:
    files = [cost.files for cost in costs]
    nbytes = [cost.nbytes for cost in costs]
    return f"{min(files)} to {max(files)} files, {size(min(nbytes))} to {size(max(nbytes))}"


def over_read(report: ReshardReport, costs: Costs) -> float:
    """Bytes that are read from the source's files for each byte of its tensors."""
    return costs.read_bytes / max(1, report.read_bytes)


def _ranks(report: ReshardReport) -> str:
    mean = sum(report.rank_bytes) / len(report.rank_bytes)
    most = max(report.rank_bytes)
    over = f", the fullest {most / mean - 1:.1%} above the mean" if mean and most > mean else ""
    return f"  a rank holds {size(min(report.rank_bytes))} to {size(most)}{over}"


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
