"""Draw which rank and file holds which box of a tensor, and list them.

Each row or column of the picture's cells represents an index of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.views import ChunkLocation, chunk_locations
from ckptool.core.box import Box
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    TensorEntry,
)
from ckptool.core.dtype import short_name
from ckptool.core.selection import tensors_named
from ckptool.core.sharding.index import ChunkIndex
from ckptool.core.text import plural, ranges, size, visible
from ckptool.render.text import Cell, columns

_WIDEST = 64
_TALLEST = 32
_LONGEST_LABEL = 8
_MARGIN = 10
_MOST_BOXES = 64
_MOST_PICTURES = 16
_MOST_LEGEND_LINES = 64
_HEADINGS = ("", "rank", "file", "box", "offset", "bytes", "")
_COLORS = (
    "#5fafff #87d75f #ffaf5f #d787d7 #5fd7d7 #ffd75f #ff8787 #afafff"
    " #afd787 #d7afff #87d7af #d7af87"
).split()


def shard_lines(catalog: Catalog, pattern: str, screen: Console) -> list[Text]:
    """Return the picture and the legend of each tensor that matches, up to a few.

    Raises UsageError if none does.
    """
    names = tensors_named(catalog, [pattern], "--shards")
    lines: list[Text] = []
    for name in names[:_MOST_PICTURES]:
        lines += [*([Text()] if lines else []), *_one_tensor(catalog.tensors[name], screen)]
    if len(names) > _MOST_PICTURES:
        more = f"  ... and {len(names) - _MOST_PICTURES:,} more tensors; --json has all"
        lines += [Text(), Text(more, style="dim")]
    return lines


def _one_tensor(entry: TensorEntry, screen: Console) -> list[Text]:
    lines = [Text(visible(entry.name), style="bold"), _facts(entry), Text()]
    if entry.elements:
        lines += [*_Picture(entry, screen).lines(), Text()]
    else:
        lines += [Text("  empty tensor", style="dim"), Text()]
    return lines + legend_lines(entry, screen)


def _facts(entry: TensorEntry) -> Text:
    dtype = short_name(entry.dtype.name)
    facts = Text.assemble((f"  {list(entry.shape)}", "green"), "  ", (dtype, "yellow"))
    if entry.placements is not None:
        facts.append("  " + ", ".join(map(str, entry.placements)), style="magenta")
    return facts.append(f"  {size(entry.nbytes)} in {plural(len(entry.chunks), 'chunk')}")


class _Picture:
    """Up to two dims of a tensor as blocks; the others are shown at index 0."""

    def __init__(self, entry: TensorEntry, screen: Console) -> None:
        rank = len(entry.shape)
        chunks = tuple(chunk for chunk in entry.chunks if len(chunk.box.lo) == rank)
        self._index = ChunkIndex(replace(entry, chunks=chunks))
        self._rank = rank
        plain = screen.color_system is None or screen.no_color
        outline = ("+", "|", "-") if screen.options.ascii_only else ("┌", "│", "─")
        self._corner, self._side, self._edge = outline if plain else ("", "", " ")
        self._label_width = max((len(_label(chunk)) for chunk in chunks), default=1)
        down, across = _cut_dims(entry.shape, chunks)
        width = max(8, min(screen.width - _MARGIN - 2, _WIDEST))
        most = width // (self._label_width + 1)
        self._across = _make_axis(entry.shape, chunks, across, width, self._label_width + 1, most)
        tall = _height(entry.shape, down, across, width)
        self._down = _make_axis(entry.shape, chunks, down, tall, 1, _TALLEST)

    def lines(self) -> list[Text]:
        """Return a ruler, the rows of blocks, and remarks on what is not drawn."""
        lines = [self._ruler()]
        above: list[Chunk] = []
        for number, row in enumerate(self._down.cells):
            line, above = self._row(row, above)
            margin = Text(f"{self._down.label(number):>{_MARGIN - 1}} ", style="dim")
            lines.append(margin.append_text(line).append(self._side))
        return lines + self._remarks()

    def _ruler(self) -> Text:
        line = " " * _MARGIN
        for number in range(len(self._across.cells)):
            label = self._across.label(number)
            if label and len(line) <= _MARGIN + number:
                line = line.ljust(_MARGIN + number) + label + " "
        return Text(line.rstrip(), style="dim")

    def _row(self, row: int, above: list[Chunk]) -> tuple[Text, list[Chunk]]:
        """Draw a line of blocks, and return its chunks; ``above`` are those of the line before."""
        line, row_chunks, cells = Text(), [], self._across.cells
        by_column = {column: self._chunks(row, column) for column in set(cells)}
        for chunks, block in groupby(cells, key=by_column.__getitem__):
            begins = not (len(chunks) == 1 and chunks[0] in above)
            line.append_text(self._block(chunks, len(list(block)), begins=begins))
            row_chunks += chunks if len(chunks) == 1 else []
        return line, row_chunks

    def _chunks(self, row: int, column: int) -> list[Chunk]:
        at = [0] * self._rank
        for axis, position in ((self._down, row), (self._across, column)):
            if axis.dim is not None:
                at[axis.dim] = position
        return [overlap.chunk for overlap in self._index.find(Box.at(at, [1] * self._rank))]

    def _block(self, chunks: list[Chunk], width: int, *, begins: bool) -> Text:
        if len(chunks) != 1:
            return Text(("·" if not chunks else "X") * width, style="bold red")
        style = f"black on {_color(chunks[0].rank)}"
        room = width - len(self._corner)
        label = _label(chunks[0])[:room]
        if begins:
            return Text(self._corner + label.ljust(room, self._edge), style)
        return Text(self._side.ljust(width), style)

    def _remarks(self) -> list[Text]:
        remarks = [axis.remark for axis in (self._down, self._across) if axis.remark]
        drawn = [axis.dim for axis in (self._down, self._across) if axis.dim is not None]
        if len(drawn) < self._rank:
            remarks.append(f"dims {drawn[0]} and {drawn[1]} of {self._rank}, other dims at index 0")
        return [Text(" " * _MARGIN + remark, style="dim") for remark in remarks]


def _height(shape: tuple[int, ...], down: int | None, across: int | None, width: int) -> int:
    """Return the number of rows that makes an element about as high as wide, within limits."""
    if down is None or across is None:
        return 2
    return max(4, min(12, round(width / 2 * shape[down] / max(shape[across], 1))))


def _label(chunk: Chunk) -> str:
    """Name the ranks that hold a chunk, in few characters."""
    if chunk.rank is None:
        return "?"
    ranks = sorted({chunk.rank, *(copy.rank for copy in chunk.copies)})
    label = ranges(ranks)
    return label if len(label) <= _LONGEST_LABEL else f"{ranks[0]}+{len(ranks) - 1}"


class _Axis(Struct, frozen=True):
    """``cells`` are indices of tensor dim ``dim``; ``starts`` the numbers of cells worth a label.

    ``dim`` is None on a side along which the tensor does not extend.
    """

    dim: int | None
    cells: tuple[int, ...]
    starts: frozenset[int] = frozenset()
    remark: str = ""

    def label(self, number: int) -> str:
        """Return the index at which a box begins in this cell, or nothing."""
        return str(self.cells[number]) if number in self.starts else ""


def _cut_dims(shape: Sequence[int], chunks: Sequence[Chunk]) -> tuple[int | None, int | None]:
    """Choose the dims to draw vertically and horizontally: those cut most, else the first two."""
    dims = range(len(shape))
    if len(dims) < 2:
        return None, next(iter(dims), None)
    cuts = {dim: len({chunk.box.lo[dim] for chunk in chunks}) for dim in dims}
    down, across = sorted(sorted(dims, key=lambda dim: -cuts[dim])[:2])
    return down, across


def _make_axis(
    shape: Sequence[int],
    chunks: Sequence[Chunk],
    dim: int | None,
    target: int,
    least: int,
    most: int,
) -> _Axis:
    """Return cells for a dim: about ``target``, at least ``least`` per box, for ``most`` boxes."""
    if dim is None:
        return _Axis(None, (0,) * target)
    length = shape[dim]
    boxes = [chunk.box for chunk in chunks if chunk.box.volume]
    edges = {edge for box in boxes for edge in (box.lo[dim], box.hi[dim]) if 0 < edge < length}
    bounds = [0, *sorted(edges), length]
    runs, remark = pairwise(bounds), ""
    blocks = [(low, max(least, round(target * (high - low) / length))) for low, high in runs]
    if len(blocks) > most:
        remark = f"{len(blocks):,} boxes along dim {dim}, drawn as {most} blocks"
        blocks = [(length * i // most, least) for i in range(most)]
    cells: list[int] = []
    starts = set()
    for low, size_in_cells in blocks:
        starts.add(len(cells))
        cells += [low] * size_in_cells
    return _Axis(dim, tuple(cells), frozenset(starts), remark)


def _color(rank: int | None) -> str:
    return "#bcbcbc" if rank is None else _COLORS[rank % len(_COLORS)]


def legend_lines(entry: TensorEntry, screen: Console) -> list[Text]:
    """Return a row per box, including replicas; if there are hundreds, per rank and file."""
    groups: dict[object, list[ChunkLocation]] = {}
    locations = list(chunk_locations(entry))
    for number, location in enumerate(locations):
        key = number if len(locations) <= _MOST_BOXES else (location.rank, location.at.file)
        groups.setdefault(key, []).append(location)
    rows = [_row(group) for group in groups.values()]
    most = _MOST_LEGEND_LINES if screen.is_terminal else len(rows)
    lines = columns(screen, rows[:most], "lrllrrl", heads=_HEADINGS, cuts=2)
    if len(rows) > most:
        lines.append(Text(f"  ... and {len(rows) - most:,} more files", style="dim"))
    return lines


def _row(group: list[ChunkLocation]) -> list[Cell]:
    """Return the line of one box, or of several boxes of one rank and file."""
    first, *rest = sorted(group, key=lambda location: location.at.offset)
    box = str(first.box) if first.box.volume else f"{first.box} (empty)"
    return [
        ("  ", f"on {_color(first.rank)}"),
        ("?" if first.rank is None else str(first.rank), "bold"),
        first.at.file,
        (plural(len(group), "box") if rest else box, "green"),
        f"{first.at.offset:,}" + (f" .. {rest[-1].at.offset:,}" if rest else ""),
        f"{sum(location.nbytes for location in group):,}",
        ("" if rest else first.remark, "dim"),
    ]
