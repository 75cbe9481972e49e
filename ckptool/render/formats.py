"""The table of formats."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ckptool.formats import CONVERTERS, FORMATS, WRITERS
from ckptool.render.text import console


def _rows() -> list[tuple[str, bool, bool, bool, str]]:
    """Name, read, written by convert, written by reshard, and what it is."""
    known = [(f.name, f.reads, f.name in CONVERTERS, f.summary) for f in FORMATS.values()]
    checkpointing = ("torch-checkpointing", True, False, "torch_checkpointing's rank files")
    return [
        (name, reads, converts, name in WRITERS, summary)
        for name, reads, converts, summary in (*known, checkpointing)
    ]


def show_formats() -> None:
    """One row a format: its name, what reads and writes it, and what it is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("format", "read", "convert", "reshard", "what it is"):
        table.add_column(heading)
    for name, *marks, summary in _rows():
        table.add_row(str(name), *("yes" if mark else "-" for mark in marks), str(summary))
    console().print(table)


def formats_json() -> dict[str, Any]:
    """The table as ``ckptool.formats/1``."""
    keys = ("name", "reads", "converts", "reshards", "summary")
    rows = [dict(zip(keys, row, strict=True)) for row in _rows()]
    return {"schema": "ckptool.formats/1", "formats": rows}
