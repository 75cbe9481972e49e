"""Rows of the transfer benches whose commands are forked from a Python that has torch imported."""

from __future__ import annotations

import sys

from msgspec.structs import replace

from benchmarks.rows import Row


def forked(row: Row, python: str) -> Row:
    """The row, with the Python that forks unless what its start imports is looked at."""
    if row.measure == "cpu" and not row.needs:
        return row
    return replace(row, command=tuple(python if w == sys.executable else w for w in row.command))
