"""An open checkpoint as notebooks show it: what it is, its parts, its tensors folded.

Names are inert.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

from ckptool.commands.document import cells_html, table_html
from ckptool.commands.inspect.fold import fold
from ckptool.commands.inspect.report import PartShare, shares_of
from ckptool.core.dtype import short_name
from ckptool.core.text import plural

if TYPE_CHECKING:
    from ckptool.api.checkpoint import Checkpoint

_MOST_ROWS = 50
_PARTS = {"model": "#18794e", "optimizer": "#3f51c7", "other": "#96600a"}
"""The color of the bar of each part: it has enough contrast on light and dark pages."""


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Return the summary of a checkpoint, a table of its parts, and one of its tensors folded."""
    lines = fold(checkpoint.tensors.values())
    rows = [
        cells_html(
            "td",
            (
                line.name,
                short_name(line.entry.dtype.name),
                str(list(line.entry.shape)),
                ", ".join(map(str, line.entry.placements or ())),
                f"x{line.count}" if line.count > 1 else "",
            ),
        )
        for line in islice(lines, _MOST_ROWS)
    ]
    rest = len(lines) - len(rows)
    rows += [cells_html("td", (f"... and {rest:,} more", "", "", "", ""))] if rest else []
    tensors = [cells_html("th", ("tensor", "dtype", "shape", "placements", "")), *rows]
    facts = "".join(f"<div>{escape(fact)}</div>" for fact in _facts(checkpoint))
    parts = table_html(_parts(shares_of(checkpoint.tensors.values())))
    head = f"<code>{escape(repr(checkpoint))}</code>{facts}"
    return f"<div>{head}{parts}{table_html(tensors)}</div>"


def _facts(checkpoint: Checkpoint) -> list[str]:
    catalog = checkpoint.catalog
    mesh = checkpoint.mesh
    facts = [] if checkpoint.step is None else [f"step {checkpoint.step:,}"]
    if mesh is not None:
        facts.append(f"mesh {mesh.words}")
    elif catalog.world_size is not None:
        facts.append(plural(catalog.world_size, "rank"))
    nbytes = sum(entry.nbytes for entry in catalog.tensors.values())
    values = plural(len(catalog.objects), "non-tensor value")
    tensors = plural(len(catalog.tensors), "tensor")
    return [*facts, f"{tensors}, {nbytes:,} bytes, {values}"]


def _parts(shares: Sequence[PartShare]) -> list[str]:
    total = max(1, sum(share.nbytes for share in shares))
    heads = ("part", "dtype", "tensors", "elements", "bytes", "")
    return [cells_html("th", heads), *(_part(share, share.nbytes / total) for share in shares)]


def _part(share: PartShare, part: float) -> str:
    counts = (f"{n:,}" for n in (share.tensors, share.elements, share.nbytes))
    cells = (share.part, short_name(share.dtype.name), *counts)
    style = f"width:{120 * part:.0f}px;height:0.7em;background:{_PARTS[share.part]}"
    bar = f'<td title="{part:.1%}"><div style="{style}"></div></td>'
    return cells_html("td", cells) + bar
