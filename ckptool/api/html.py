"""An open checkpoint as notebooks show it: a table of its first tensors. Names are inert."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptool.api.checkpoint import Checkpoint

_MOST_ROWS = 50


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Return a table of names, element types and shapes, with the path above it."""
    tensors = checkpoint.tensors
    rows = [
        _row("td", (name, str(entry.dtype), str(list(entry.shape))))
        for name, entry in islice(tensors.items(), _MOST_ROWS)
    ]
    more = len(tensors) - len(rows)
    rows += [_row("td", (f"... and {more:,} more", "", ""))] if more else []
    table = "".join([_row("th", ("tensor", "dtype", "shape")), *rows])
    return f"<div><code>{escape(repr(checkpoint))}</code><table>{table}</table></div>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
