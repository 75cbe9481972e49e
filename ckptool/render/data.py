"""Data on stdout: a JSON object, or its rows as a table; and the streams, as all is shown there."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import msgspec

from ckptool.core.text import visible

Rows = Sequence[Mapping[str, Any]]
_PIECE = 2048
"""Rows of a list that are printed at a time: half a megabyte of tensors."""


def stream_of(*, stderr: bool) -> TextIO:
    """Return a stream of the process for lines, which spells out what its encoding lacks."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout, the rows of a long list in pieces."""
    for piece in _json_pieces(content):
        sys.stdout.write(piece)
    sys.stdout.write("\n")
    sys.stdout.flush()


def print_json_line(content: Mapping[str, Any]) -> None:
    """Print one of several JSON objects on stdout, as one line."""
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
    sys.stdout.flush()


def _json_pieces(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of an object, which would take the memory of all rows again if held whole."""
    opening = "{"
    for key, value in content.items():
        yield opening
        if isinstance(value, list) and len(value) > _PIECE:
            yield from _list_pieces(key, value)
        else:
            yield _indent({key: value})[1:-2]
        opening = ","
    yield "\n}" if content else "{}"


def _list_pieces(key: str, rows: Sequence[Any]) -> Iterator[str]:
    """Yield the text of a member of an object: its key, and a list of many rows."""
    head, end = f"{{\n  {json.dumps(key)}: [", "\n  ]\n}"
    opening = head[1:]
    for start in range(0, len(rows), _PIECE):
        yield opening + _indent({key: rows[start : start + _PIECE]})[len(head) : -len(end)]
        opening = ","
    yield end[:-2]


def _indent(content: Mapping[str, Any]) -> str:
    """Return what indent=2 makes of an object, which Python's own encoder writes slowly."""
    try:
        return msgspec.json.format(json.dumps(content, allow_nan=False), indent=2)
    except msgspec.DecodeError:  # an escape that represents half a character
        return json.dumps(content, indent=2, allow_nan=False)


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
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False)
