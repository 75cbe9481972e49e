"""Rows of JSON as one CSV or Markdown table, for a spreadsheet, a wiki or a pull request."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptool.render.text import visible

Rows = Sequence[Mapping[str, Any]]


def print_table(rows: Rows, form: str) -> None:
    """Print rows as ``csv`` or ``markdown``; the columns are their keys, in order."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    if form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([heads, *([_field(row.get(head)) for head in heads] for row in rows)])
    else:
        sys.stdout.writelines(_markdown(heads, rows))
    sys.stdout.flush()


def _markdown(heads: Sequence[str], rows: Rows) -> Iterable[str]:
    """Yield the lines of a Markdown table; columns of numbers are aligned to the right."""
    counts = {head: all(_is_number(row.get(head)) for row in rows) for head in heads}
    yield _line(heads)
    yield _line("---:" if counts[head] else "---" for head in heads)
    for row in rows:
        yield _line(_cell(row.get(head)) for head in heads)


def _field(value: object) -> str:
    """Return a value for CSV: on one line, and never as a spreadsheet formula."""
    text = visible(_text(value))
    return f"'{text}" if isinstance(value, str) and _FORMULA.match(text) else text


_FORMULA = re.compile(r"[=@]|[+-](?![0-9.]*([eE][+-]?[0-9]+)?\Z|inf)")
"""What spreadsheets run as formulas; a sign alone may also begin a number."""


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(value: object) -> str:
    """Return a value for Markdown, with all markup escaped."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _MARKUP.sub(r"\\\g<0>", visible(_text(value)))


_MARKUP = re.compile(r"[\\`*<>|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=\])\(")
"""What begins markup; not an underscore inside a word, nor a bracket alone."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    """Return a JSON value as one text; a list of texts is joined by commas."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False)
