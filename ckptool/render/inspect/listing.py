"""Tensors, their statistics and non-tensor values, one per line; repeated layers folded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.records import content_of, simple_value, unwrap
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.chunks import chunks_of
from ckptool.core.dtype import short_name
from ckptool.core.mesh import Placement
from ckptool.core.selection import tensors_named
from ckptool.core.state_category import STATE_CATEGORIES, state_category
from ckptool.core.text import list_some, plural
from ckptool.render.inspect.values import preview
from ckptool.render.text import Cell, cell_width, columns, ranges, visible
from ckptool.serialization.pickle.records import Call
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


def in_order(entries: Iterable[TensorEntry], sort: str) -> list[TensorEntry]:
    """Sort tensors by ``name``, layer 2 before layer 10, or by ``size``, the largest first."""
    by_name = sorted(entries, key=lambda entry: natural(entry.name))
    return sorted(by_name, key=lambda entry: -entry.nbytes) if sort == "size" else by_name


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
    values = {name: catalog.objects[name].value for name in sorted(catalog.objects, key=natural)}
    rows = [
        (name, (type_name(value), "yellow"), (shown, "cyan"))
        for head, whole in values.items()
        for name, value, shown in _value_rows(head, whole)
    ]
    title = Text(f"  {plural(len(values), 'non-tensor value')}", style="bold")
    return [title, *columns(screen, rows, "lll", cuts=2)]


def _value_rows(
    name: str, value: Any, depth: int = _DEEPEST_NODE, seen: set[int] | None = None
) -> Iterator[tuple[str, Any, str]]:
    """Yield a value with its text; after an object with attributes, these.

    The attributes of a node of omegaconf are what it holds, with theirs in turn; those of one that
    was ``seen`` are not repeated.
    """
    seen = set() if seen is None else seen
    held = unwrap(value)
    is_node = held is not value
    fields: Any = held if is_node and isinstance(held, dict) else {}
    if isinstance(held, Call) and simple_value(held) is None:
        arguments, fields = content_of(held) or ((), {})
        fields = fields if not arguments else {}
    fields = {} if id(held) in seen else fields
    seen.add(id(held))
    shown = plural(len(fields), "attribute") if fields else preview(held, _LONGEST_VALUE)
    yield name, value, shown
    for key, inner in fields.items():
        if is_node and depth:
            yield from _value_rows(f"{name}.{key}", inner, depth - 1, seen)
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
        [f"  {key}", (preview(text, _LONGEST_VALUE), "cyan"), (_where(found, text), "dim")]
        for key, found in islice(sorted(files.items()), most)
        for text in found
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
    shown = next((each for each in _LESS if _fits(rows, each, console)), _LESS[-1])
    heads = [_STATISTICS[at] for at in shown]
    sides = "".join("lllrrrrrrr"[at] for at in shown)
    lines = columns(
        console, [[row[at] for at in shown] for row in rows], sides, heads=heads, cuts=0
    )
    if len(shown) < len(_STATISTICS):
        left = ", ".join(head for at, head in enumerate(_STATISTICS) if at not in shown)
        lines.append(Text(f"  left out: {left}; see --json", style="dim"))
    if any(item.entry.dtype.kind == "complex" for item in stats):
        lines.append(Text("  complex numbers: statistics of their magnitudes", style="dim"))
    return lines


def _fits(rows: Sequence[Sequence[Cell]], shown: Sequence[int], console: Console) -> bool:
    """Return whether these columns are one line each, with enough of the names."""
    widths = [max(map(cell_width, [_STATISTICS[at], *(row[at] for row in rows)])) for at in shown]
    taken = sum(width + 2 for width in (min(widths[0], _NAME), *widths[1:]))
    return not console.is_terminal or taken <= console.width


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


# Folding

_NUMBER = re.compile(r"([0-9](?:(?<![^.][0-9])|(?<=@rank[0-9]))(?:(?<!0)[0-9]{1,8})?(?![^.@]))")
"""A number between dots. It begins with a digit, and all else is looked at from there: re searches
for a set of characters many times as fast as for anything else."""

Numbers = tuple[int, ...]
Kind = TypeVar("Kind", bound=Hashable)
Looks = Callable[[TensorEntry], Hashable]
_STATES = re.compile(r"\{[A-Za-z][^{}]*\}$")


class TensorLine(Struct, frozen=True):
    """``count`` tensors similar to ``entry``; ``name`` has braces for the differing parts."""

    part: str
    name: str
    entry: TensorEntry
    count: int


def line_name(line: TensorLine, brief: bool) -> Text:
    """Return the name of a line, its braces in color; ``brief``, without the states' names."""
    name = Text(visible(_STATES.sub("{…}", line.name) if brief else line.name))
    name.highlight_regex(r"\{[^{}]*\}|(?<![^.])\*(?![^.])", "bold cyan")
    return name


def fold(entries: Collection[TensorEntry], looks: Looks | None = None) -> list[TensorLine]:
    """Return few lines that name every tensor once, in natural order within each part.

    Those of a line look alike: in type, shape and placements, or as ``looks`` says.
    """
    looks = looks or _looks
    known = {entry.name: entry for entry in entries}
    kinds = {name: (state_category(entry), looks(entry)) for name, entry in known.items()}
    lines = [
        TensorLine(part, name, known[first], count)
        for name, first, (part, _), count in fold_names(kinds)
    ]
    lines.sort(key=lambda line: STATE_CATEGORIES.index(line.part))
    return _fold_states(_fold_scalars(lines, list(known), looks), looks)


def fold_names(kinds: Mapping[str, Kind]) -> list[tuple[str, str, Kind, int]]:
    """Join names of one kind that differ only in numbers, in natural order.

    Each line has the name with braces, the first of its names, their kind, and how many they are.
    """
    alike: dict[tuple[tuple[str, ...], Kind], dict[Numbers, str]] = {}
    for name, kind in kinds.items():
        words, numbers = split_numbers(name)
        alike.setdefault((words, kind), {})[numbers] = name
    lines = []
    for (words, kind), members in alike.items():
        for axes in products(members):
            first = members[tuple(axis[0] for axis in axes)]
            lines.append((with_numbers(words, axes), first, kind, math.prod(map(len, axes))))
    return sorted(lines, key=lambda line: natural(line[1]))


def _looks(entry: TensorEntry) -> tuple[object, ...]:
    scattered = entry.placements is None and len(entry.chunks)
    return entry.dtype, entry.shape, entry.placements, scattered


def split_numbers(name: str) -> tuple[tuple[str, ...], Numbers]:
    """Split a dotted name into its integer components and the words around them."""
    pieces = _NUMBER.split(name)
    return tuple(pieces[::2]), tuple(map(int, pieces[1::2]))


def with_numbers(words: Sequence[str], axes: Sequence[Numbers]) -> str:
    """Rebuild a name, with several numbers at one place in braces."""
    name = words[0]
    for axis, word in zip(axes, words[1:], strict=True):
        name += (f"{{{ranges(axis)}}}" if len(axis) > 1 else str(axis[0])) + word
    return name


def products(tuples: Collection[Numbers]) -> list[tuple[Numbers, ...]]:
    """Return disjoint products of number sets whose union is the set of tuples."""
    if () in tuples:
        return [()]
    tails: dict[int, set[Numbers]] = {}
    for head, *tail in tuples:
        tails.setdefault(head, set()).add(tuple(tail))
    heads: dict[frozenset[Numbers], list[int]] = {}
    for head in sorted(tails):
        heads.setdefault(frozenset(tails[head]), []).append(head)
    return [(tuple(axis), *rest) for tail, axis in heads.items() for rest in products(tail)]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which layer 2 comes before layer 10."""
    pieces = _NUMBER.split(name)
    return [(0, int(p), "") if i % 2 else (1, 0, p) for i, p in enumerate(pieces)]


def _fold_scalars(lines: list[TensorLine], names: list[str], looks: Looks) -> list[TensorLine]:
    """Join an optimizer's 0-d states as ``optim.state.*.step``, if that matches no others."""
    groups: dict[tuple[str, str, object], list[TensorLine]] = {}
    for line in lines:
        steps = line.entry.name.split(".")
        if line.part == "optimizer" and not line.entry.shape and len(steps) > 3:
            key = (".".join(steps[:2]) + ".", "." + steps[-1], looks(line.entry))
            groups.setdefault(key, []).append(line)
    merged: dict[str, TensorLine | None] = {}
    for (head, tail, _), group in groups.items():
        if len(group) == 1:
            continue
        count = sum(line.count for line in group)
        if count == sum(name.startswith(head) and name.endswith(tail) for name in names):
            merged |= dict.fromkeys(line.name for line in group)
            merged[group[-1].name] = replace(group[-1], name=f"{head}*{tail}", count=count)
    folded = [merged.get(line.name, line) for line in lines]
    return [line for line in folded if line is not None]


def _fold_states(lines: list[TensorLine], looks: Looks) -> list[TensorLine]:
    """Join an optimizer's states of one parameter, such as ``{exp_avg,exp_avg_sq}``."""
    groups: dict[tuple[object, ...], list[TensorLine]] = {}
    for line in lines:
        head, _, state = line.name.rpartition(".")
        is_state = line.part == "optimizer" and head and not re.search(r"[{}*]", state)
        groups.setdefault((head, looks(line.entry)) if is_state else (line,), []).append(line)
    joined = []
    for first, *others in groups.values():
        head, _, state = first.name.rpartition(".")
        states = ",".join([state, *(line.name.rpartition(".")[2] for line in others)])
        name = f"{head}.{{{states}}}" if others else first.name
        count = sum(line.count for line in (first, *others))
        joined.append(replace(first, name=name, count=count))
    return joined
