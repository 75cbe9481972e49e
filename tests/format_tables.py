"""The docs' tables of formats, a row each, of what the registry says and of what is measured.

``python tests/format_tables.py`` writes them anew. What a person wrote about a format stays.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from conftest import GOOD

import ckptool
from ckptool.formats import FORMATS
from ckptool.formats.base import Format

DOCS = Path(ckptool.__file__).parent / "docs"
FORMATS_DOC, VERIFY_DOC = DOCS / "formats.md", DOCS / "verify.md"
AGAIN = "run: python tests/format_tables.py"
FIXTURES = {
    row.name: [
        case.name
        for case in GOOD
        if case.facts["format"] == row.name and sum(map(Path.is_file, case.path.rglob("*"))) > 1
    ]
    for row in FORMATS.built_in()
    if row.detection.probe is not None
}
"""Formats that are detected, and their checkpoints of several files."""


def rows_of(doc: Path) -> dict[str, list[str]]:
    """The rows of a doc's table of formats by the one that each begins with, its head as ``""``."""
    lines = doc.read_text().splitlines()
    lines = [lines[at] for at in table_of_formats(lines)]
    cells = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines]
    head, _, *body = cells
    return {"": head[1:]} | {name.strip("`"): rest for name, *rest in body}


def table_of_formats(lines: list[str]) -> range:
    """Where the lines of the first table are whose rows begin with formats."""
    is_row = [line.startswith("|") for line in [*lines, ""]]
    start = next(at for at, line in enumerate(lines) if line.startswith(("| name |", "| format |")))
    return range(start, is_row.index(False, start))


def put_rows(doc: Path, rows: dict[str, list[str]]) -> None:
    """Replace the rows of a doc's table of formats, and leave the rest as it is."""
    lines = doc.read_text().splitlines()
    table = table_of_formats(lines)
    text = [f"| `{name}` | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    text = [" ".join(line.split()) for line in text]
    doc.write_text("\n".join([*lines[: table[1] + 1], *text, *lines[table[-1] + 1 :]]) + "\n")


def listed(row: Format, cells: list[str] | None) -> list[str]:
    """What ``formats.md`` says of a format: what it is, what is read, what writes it, and notes."""
    writers = {"convert": row.writing.convert, "reshard": row.writing.reshard}
    written = ", ".join(name for name, writer in writers.items() if writer is not None) or "-"
    what, read, notes = (cells[0], cells[1], cells[3]) if cells else (row.summary, "yes", "")
    return [what, read, written, notes]


def listed_formats() -> dict[str, list[str]]:
    """The rows that ``formats.md`` must have: those there are, and those of further formats."""
    rows = rows_of(FORMATS_DOC)
    order = [*(n for n in rows if n in FORMATS), *(n for n in FORMATS if n not in rows)]
    return {name: listed(FORMATS[name], rows.get(name)) for name in order}


def write() -> None:
    """Write both tables."""
    sys.path.insert(0, str(Path(__file__).parent / "attacks"))
    from attack_files import KINDS
    from test_whole_files import measured

    put_rows(FORMATS_DOC, listed_formats())
    rows = rows_of(VERIFY_DOC)
    order = [*(n for n in rows if n in FIXTURES), *(n for n in FIXTURES if n not in rows)]
    with tempfile.TemporaryDirectory() as folder:
        found = {name: measured(name, Path(folder)) for name in order}
    put_rows(
        VERIFY_DOC, {name: [answers[kind] for kind in KINDS] for name, answers in found.items()}
    )


if __name__ == "__main__":
    write()
