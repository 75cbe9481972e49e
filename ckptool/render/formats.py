"""The table of formats."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ckptool.commands.formats import known_formats
from ckptool.render.text import console


def show_formats() -> None:
    """One row a format: its name, what reads and writes it, and what it is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("format", "read", "convert", "reshard"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for name, *marks, summary in known_formats():
        table.add_row(str(name), *("yes" if mark else "-" for mark in marks), str(summary))
    console().print(table)


def formats_json() -> dict[str, Any]:
    """The table as ``ckptool.formats/1``."""
    rows = [row._asdict() for row in known_formats()]
    return {"schema": "ckptool.formats/1", "formats": rows}
