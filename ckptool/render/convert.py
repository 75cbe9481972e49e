"""What a conversion did, or would do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.document import document
from ckptool.core.layout import FileLayout
from ckptool.render.moves import moves_json, show_moves
from ckptool.render.text import columns, console, emit, free, plural, size, visible

if TYPE_CHECKING:
    from ckptool.commands.convert import ConvertReport


def show_convert(report: ConvertReport, *, dry_run: bool) -> None:
    """A line for the whole; for a dry run also the files and the figures."""
    screen = console()
    verb = "would write" if dry_run else "wrote"
    lines = [
        Text.assemble(
            f"{verb} ",
            (visible(str(report.target)), "bold"),
            f" ({report.target_format}): {plural(report.tensors, 'tensor')},"
            f" {plural(report.objects, 'value')}, {size(report.write_bytes)}"
            f" in {plural(len(report.files), 'file')}, from {report.source_format}",
        )
    ]
    lines += [
        Text(f"  {what}: {plural(count, 'tensor')} from {kind}")
        for what, counts in (("cast", report.cast), ("dequantized", report.dequantized))
        for kind, count in counts.items()
    ]
    lines += [Text(f"  excluded: {line}") for line in report.excluded]
    if dry_run:
        read, written = size(report.read_bytes), size(report.write_bytes)
        lines.append(Text(f"  reads {read}, writes {written}{free(report.free_bytes)}"))
    emit(screen, lines)
    if dry_run:
        if report.map is not None:
            show_moves(report.map, screen)
        show_files(report.files, screen)


def show_files(files: Iterable[FileLayout], screen: Console) -> None:
    """Every file with its size."""
    rows = [[Text(size(file.nbytes)), Text(visible(file.path))] for file in files]
    emit(screen, columns(screen, rows, "rl", cuts=1))


def convert_json(report: ConvertReport, *, dry_run: bool) -> dict[str, Any]:
    """Return the report as ``ckptool.convert/2``."""
    files = [{"path": file.path, "bytes": file.nbytes} for file in report.files]
    more = {"files": files, "map": moves_json(report.map), "written": not dry_run}
    return document("convert", report, **more)
