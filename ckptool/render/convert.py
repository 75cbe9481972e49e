"""What a conversion did, or would do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from ckptool.commands.convert import ConvertReport
from ckptool.core.layout import FileLayout
from ckptool.render.moves import moves_json, show_moves
from ckptool.render.text import console, escaped, free, size


def show_convert(report: ConvertReport, *, dry_run: bool) -> None:
    """A line for the whole; for a dry run also the files and the figures."""
    screen = console()
    verb = "would write" if dry_run else "wrote"
    screen.print(
        f"{verb} [bold]{escaped(str(report.target))}[/] ({report.target_format}):"
        f" {report.tensors:,} tensors, {report.objects:,} values, {size(report.write_bytes)}"
        f" in {len(report.files):,} files, from {report.source_format}",
        highlight=False,
        soft_wrap=True,
    )
    for dtype, count in report.cast.items():
        screen.print(f"  cast: {count:,} tensors that were {dtype}", highlight=False)
    for kind, count in report.dequantized.items():
        screen.print(f"  dequantized: {count:,} tensors that were {kind}", highlight=False)
    for line in report.left_out:
        screen.print(f"  left out as asked: {line}", highlight=False)
    if dry_run:
        screen.print(
            f"  reads {size(report.read_bytes)}, writes {size(report.write_bytes)}"
            f"{free(report.free_bytes)}",
            highlight=False,
        )
        if report.map is not None:
            show_moves(report.map, screen)
        show_files(report.files, screen)


def show_files(files: Iterable[FileLayout], screen: Console) -> None:
    """Every file with its size."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for file in files:
        table.add_row(size(file.nbytes), escaped(file.path))
    screen.print(table)


def convert_json(report: ConvertReport, *, dry_run: bool) -> dict[str, Any]:
    """The report as ``ckptool.convert/1``."""
    return {
        "schema": "ckptool.convert/1",
        "source": {"path": str(report.source), "format": report.source_format},
        "target": {"path": str(report.target), "format": report.target_format},
        "written": not dry_run,
        "totals": {
            "tensors": report.tensors,
            "objects": report.objects,
            "read_bytes": report.read_bytes,
            "write_bytes": report.write_bytes,
        },
        "files": [{"path": file.path, "nbytes": file.nbytes} for file in report.files],
        "map": moves_json(report.map),
        "cast": report.cast,
        "dequantized": report.dequantized,
        "left_out": list(report.left_out),
        "notes": list(report.notes),
    }
