"""Tensors, their statistics and non-tensor values, one per line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.fold import TensorLine
from ckptool.commands.inspect.records import parts_of, unwrap
from ckptool.commands.inspect.views import in_order
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.chunks import chunks_of
from ckptool.core.dtype import short_name
from ckptool.core.mesh import Placement
from ckptool.core.selection import tensors_named
from ckptool.core.text import list_some, natural_key, plural, ranges, visible
from ckptool.render.inspect.values import preview
from ckptool.render.text import Cell, cell_width, columns
from ckptool.serialization.state_dict.values import type_name

if TYPE_CHECKING:
    from ckptool.commands.inspect.stats import Number, TensorStats

_HEADINGS = ("name", "shape", "dtype", "placements", "chunks", "writers", "bytes")
_STATISTICS = ("name", "shape", "dtype", "min", "max", "mean", "std", "zeros", "nan", "inf")
_LESS = (tuple(range(10)), (0, 3, 4, 5, 6, 8, 9), (0, 3, 4, 8, 9))
"""Which statistics are shown, where there is less room."""
_NAME = 24
"""Cells of a name that are left of it at least."""
_LONGEST_VALUE = 200
_DEEPEST_NODE = 8
ROOMY = 100
_BRIEF = {"Shard": "S", "StridedShard": "_S", "Partial": "P", "Replicate()": "R"}


def tensor_lines(
    catalog: Catalog, globs: Sequence[str], screen: Console, sort: str = "name"
) -> list[Text]:
    """List every tensor that matches, in order; UsageError if a glob matches none."""
    entries = in_order(
        [catalog.tensors[name] for name in tensors_named(catalog, globs, "NAME")], sort
    )
    brief = screen.is_terminal and screen.width < ROOMY
    rows = [_tensor(entry, brief) for entry in entries]
    return columns(screen, rows, "llllrrr", heads=_HEADINGS, cuts=0)


def placements_text(placements: Sequence[Placement], brief: bool) -> str:
    """Return placements as torch writes them; ``brief``, as DTensor's own short form does."""
    text = ", ".join(map(str, placements))
    if not brief:
        return text
    return re.sub(r"Replicate\(\)|[A-Z]\w+", lambda match: _BRIEF[match[0]], text)


def _tensor(entry: TensorEntry, brief: bool) -> list[Cell]:
    placements = "-" if entry.placements is None else placements_text(entry.placements, brief)
    return [
        entry.name,
        (str(list(entry.shape)), "green"),
        (short_name(entry.dtype.name), "yellow"),
        (placements, "magenta"),
        f"{len(entry.chunks):,}",
        _writers(entry),
        f"{entry.nbytes:,}",
    ]


def _writers(entry: TensorEntry) -> str:
    """Return the ranks that wrote any of a tensor, as far as the files say."""
    ranks = {rank for rank in chunks_of(entry).spans.ranks if rank is not None}
    return ranges(sorted(ranks)) or "-"


def value_lines(catalog: Catalog, screen: Console) -> list[Text]:
    """List every non-tensor value with its type, in natural order."""
    if not catalog.objects:
        return [Text("  no non-tensor values", style="dim")]
    values = {
        name: catalog.objects[name].value for name in sorted(catalog.objects, key=natural_key)
    }
    rows = [
        (name, (type_name(value), "yellow"), (shown, "cyan"))
        for head, entry in values.items()
        for name, value, shown in _value_rows(head, entry)
    ]
    title = Text(f"  {plural(len(values), 'non-tensor value')}", style="bold")
    return [title, *columns(screen, rows, "lll", cuts=2)]


def _value_rows(
    name: str, value: Any, depth: int = _DEEPEST_NODE, ids: set[int] | None = None
) -> Iterator[tuple[str, Any, str]]:
    """Yield a value with its text; after an object with attributes, these.

    The attributes of a node of omegaconf are what it holds, with theirs in turn; those of an object
    among ``ids`` were shown, and are not repeated.
    """
    ids = set() if ids is None else ids
    content = unwrap(value)
    is_node = content is not value
    arguments, fields = parts_of(value)
    fields = {} if arguments or id(content) in ids else fields
    ids.add(id(content))
    shown = plural(len(fields), "attribute") if fields else preview(content, _LONGEST_VALUE)
    yield name, value, shown
    for key, inner in fields.items():
        if is_node and depth:
            yield from _value_rows(f"{name}.{key}", inner, depth - 1, ids)
        else:
            yield f"{name}.{key}", inner, preview(inner, _LONGEST_VALUE)


def metadata_lines(catalog: Catalog, screen: Console, most: int | None = None) -> list[Text]:
    """List the texts in headers by key, up to ``most``; where files differ, with their names."""
    files: dict[str, dict[str, list[str]]] = {}
    for file, texts in catalog.metadata.items():
        for key, text in texts.items():
            files.setdefault(key, {}).setdefault(text, []).append(file)
    if not files:
        return []
    rows: list[list[Cell]] = [
        [f"  {key}", (preview(text, _LONGEST_VALUE), "cyan"), (_where(by_text, text), "dim")]
        for key, by_text in islice(sorted(files.items()), most)
        for text in by_text
    ]
    title = Text.assemble((f"  {plural(len(files), 'text')} in __metadata__", "bold"))
    if most is not None and len(files) > most:
        title.append("; use --values to list them", "dim")
    return [title, *columns(screen, rows, "lll", cuts=1)]


def _where(files: Mapping[str, Sequence[str]], text: str) -> str:
    return list_some(files[text], 1) if len(files) > 1 else ""


# Statistics


def stats_lines(stats: Sequence[TensorStats], console: Console) -> list[Text]:
    """Return a row per tensor; NaN and Inf in red if there are any."""
    rows = [_statistics(item) for item in stats]
    shown = next((choice for choice in _LESS if _fits(rows, choice, console)), _LESS[-1])
    heads = [_STATISTICS[at] for at in shown]
    sides = "".join("lllrrrrrrr"[at] for at in shown)
    lines = columns(
        console, [[row[at] for at in shown] for row in rows], sides, heads=heads, cuts=0
    )
    if len(shown) < len(_STATISTICS):
        omissions = ", ".join(head for at, head in enumerate(_STATISTICS) if at not in shown)
        lines.append(Text(f"  left out: {omissions}; see --json", style="dim"))
    if any(item.entry.dtype.kind == "complex" for item in stats):
        lines.append(Text("  complex numbers: statistics of their magnitudes", style="dim"))
    return lines


def _fits(rows: Sequence[Sequence[Cell]], shown: Sequence[int], console: Console) -> bool:
    """Return whether these columns are one line each, with enough of the names."""
    widths = [max(map(cell_width, [_STATISTICS[at], *(row[at] for row in rows)])) for at in shown]
    total = sum(width + 2 for width in (min(widths[0], _NAME), *widths[1:]))
    return not console.is_terminal or total <= console.width


def _statistics(item: TensorStats) -> list[Cell]:
    entry = item.entry
    return [
        entry.name,
        (str(list(entry.shape)), "green"),
        (short_name(entry.dtype.name), "yellow"),
        *map(_number, (item.minimum, item.maximum, item.mean, item.std, item.zeros)),
        *((_number(n), "bold red" if n else "dim") for n in (item.nan, item.inf)),
    ]


def _number(value: Number | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


_STATES = re.compile(r"\{[A-Za-z][^{}]*\}")


def line_name(line: TensorLine, screen: Console, brief: bool) -> Text:
    """Return the name of a line, its braces in color; ``brief`` and long, without states' names."""
    is_long = brief and len(line.name) > screen.width // 2
    name = Text(visible(_STATES.sub("{…}", line.name) if is_long else line.name))
    name.highlight_regex(r"\{[^{}]*\}|(?<![^.])\*(?![^.])", "bold cyan")
    return name
