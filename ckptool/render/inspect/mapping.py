"""Draw which rank and file holds which box of a tensor.

One side of the picture of a tensor: which index each row or column of cells stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, TensorEntry
from ckptool.core.plan import ChunkIndex
from ckptool.render.inspect.listing import tensor_named
from ckptool.render.inspect.overview import colour_of, legend_lines
from ckptool.render.text import plural, ranges, size, visible

_WIDEST = 64
_TALLEST = 32
_LONGEST_LABEL = 8
_MARGIN = 10


def map_lines(catalog: Catalog, name: str, screen: Console) -> list[Text]:
    """The picture of one tensor and its legend. UsageError where there is no such tensor."""
    entry = tensor_named(catalog, name)
    lines = [Text(visible(entry.name), style="bold"), _facts(entry), Text()]
    if entry.elements:
        lines += [*_Picture(entry, screen).lines(), Text()]
    else:
        lines += [Text("  empty tensor", style="dim"), Text()]
    return lines + legend_lines(entry, screen)


def _facts(entry: TensorEntry) -> Text:
    facts = Text.assemble((f"  {list(entry.shape)}", "green"), "  ", (entry.dtype.name, "yellow"))
    if entry.placements is not None:
        facts.append("  " + ", ".join(map(str, entry.placements)), style="magenta")
    return facts.append(f"  {size(entry.nbytes)} in {plural(len(entry.chunks), 'chunk')}")


class _Picture:
    """Up to two dims of a tensor as blocks; the others are seen at index 0."""

    def __init__(self, entry: TensorEntry, screen: Console) -> None:
        rank = len(entry.shape)
        chunks = tuple(chunk for chunk in entry.chunks if len(chunk.box.lo) == rank)
        self._index = ChunkIndex(replace(entry, chunks=chunks))
        self._rank = rank
        plain = screen.color_system is None or screen.no_color
        outline = ("+", "|", "-") if screen.options.ascii_only else ("┌", "│", "─")
        self._corner, self._side, self._edge = outline if plain else ("", "", " ")
        self._label_width = max((len(_label(chunk)) for chunk in chunks), default=1)
        down, across = cut_dims(entry.shape, chunks)
        width = max(8, min(screen.width - _MARGIN - 2, _WIDEST))
        most = width // (self._label_width + 1)
        self._across = make_axis(entry.shape, chunks, across, width, self._label_width + 1, most)
        tall = _height(entry.shape, down, across, width)
        self._down = make_axis(entry.shape, chunks, down, tall, 1, _TALLEST)

    def lines(self) -> list[Text]:
        """A ruler, the rows of blocks, and a word on what is not seen."""
        found = [self._ruler()]
        above: list[Chunk] = []
        for number, row in enumerate(self._down.cells):
            line, above = self._row(row, above)
            label = "" if self._down.dim is None else self._down.label(number)
            margin = Text(f"{label:>{_MARGIN - 1}} ", style="dim")
            found.append(margin.append_text(line).append(self._side))
        return found + self._remarks()

    def _ruler(self) -> Text:
        line = " " * _MARGIN
        for number in range(len(self._across.cells)):
            label = self._across.label(number)
            if label and len(line) <= _MARGIN + number:
                line = line.ljust(_MARGIN + number) + label + " "
        return Text(line.rstrip(), style="dim")

    def _row(self, row: int, above: list[Chunk]) -> tuple[Text, list[Chunk]]:
        """One line of blocks, and the chunks in it; ``above`` are those of the line before."""
        line, seen, cells = Text(), [], self._across.cells
        start = 0
        while start < len(cells):
            held = self._held(row, cells[start])
            stop = start + 1
            while stop < len(cells) and (
                cells[stop] == cells[start] or self._held(row, cells[stop]) == held
            ):
                stop += 1
            fresh = not (len(held) == 1 and held[0] in above)
            line.append_text(self._block(held, stop - start, fresh))
            seen += held if len(held) == 1 else []
            start = stop
        return line, seen

    def _held(self, row: int, column: int) -> list[Chunk]:
        at = [0] * self._rank
        for axis, position in ((self._down, row), (self._across, column)):
            if axis.dim is not None:
                at[axis.dim] = position
        return [chunk for chunk, _ in self._index.find(Box.at(at, [1] * self._rank))]

    def _block(self, held: list[Chunk], width: int, fresh: bool) -> Text:
        if len(held) != 1:
            return Text(("·" if not held else "X") * width, style="bold red")
        style = f"black on {colour_of(held[0])}"
        room = width - len(self._corner)
        label = _label(held[0])[:room]
        if fresh:
            return Text(self._corner + label.ljust(room, self._edge), style)
        return Text(self._side.ljust(width), style)

    def _remarks(self) -> list[Text]:
        told = [axis.remark for axis in (self._down, self._across) if axis.remark]
        drawn = [axis.dim for axis in (self._down, self._across) if axis.dim is not None]
        if len(drawn) < self._rank:
            told.append(f"dims {drawn[0]} and {drawn[1]} of {self._rank}, other dims at index 0")
        return [Text(" " * _MARGIN + remark, style="dim") for remark in told]


def _height(shape: tuple[int, ...], down: int | None, across: int | None, width: int) -> int:
    """Rows that make an element about as high as wide, within reason."""
    if down is None or across is None:
        return 2
    return max(4, min(12, round(width / 2 * shape[down] / max(shape[across], 1))))


def _label(chunk: Chunk) -> str:
    """The ranks that hold a chunk, in few characters."""
    if chunk.rank is None:
        return "?"
    ranks = sorted({chunk.rank, *(copy.rank for copy in chunk.copies)})
    label = ranges(ranks)
    return label if len(label) <= _LONGEST_LABEL else f"{ranks[0]}+{len(ranks) - 1}"


@dataclass(frozen=True, slots=True)
class Axis:
    """``cells`` are indices of tensor dim ``dim``; ``starts`` the numbers of cells worth a label.

    ``dim`` is None on a side along which the tensor does not extend.
    """

    dim: int | None
    cells: tuple[int, ...]
    starts: frozenset[int] = frozenset()
    remark: str = ""

    def label(self, number: int) -> str:
        """The index at which a box begins in this cell, or nothing."""
        return str(self.cells[number]) if number in self.starts else ""


def cut_dims(shape: Sequence[int], chunks: Sequence[Chunk]) -> tuple[int | None, int | None]:
    """The dims to draw downwards and across: those cut most, else the first two."""
    dims = range(len(shape))
    if len(dims) < 2:
        return None, next(iter(dims), None)
    cuts = {dim: len({chunk.box.lo[dim] for chunk in chunks}) for dim in dims}
    down, across = sorted(sorted(dims, key=lambda dim: -cuts[dim])[:2])
    return down, across


def make_axis(
    shape: Sequence[int],
    chunks: Sequence[Chunk],
    dim: int | None,
    wanted: int,
    least: int,
    most: int,
) -> Axis:
    """Cells for a dim: about ``wanted``, at least ``least`` a box, for at most ``most`` boxes."""
    if dim is None:
        return Axis(None, (0,) * wanted)
    length = shape[dim]
    solid = [chunk.box for chunk in chunks if chunk.box.volume]
    edges = {edge for box in solid for edge in (box.lo[dim], box.hi[dim]) if 0 < edge < length}
    bounds = [0, *sorted(edges), length]
    if len(bounds) - 1 <= most:
        return _exact(dim, bounds, wanted, least)
    blocks = [length * i // most for i in range(most)]
    starts = frozenset(range(0, most * least, least))
    remark = f"{len(bounds) - 1:,} boxes along dim {dim}, drawn as {most} blocks"
    return Axis(dim, tuple(at for at in blocks for _ in range(least)), starts, remark)


def _exact(dim: int, bounds: list[int], wanted: int, least: int) -> Axis:
    """Every run between two bounds in its own cells, as many as its length is worth."""
    cells: list[int] = []
    starts = set()
    for low, high in pairwise(bounds):
        starts.add(len(cells))
        cells += [low] * max(least, round(wanted * (high - low) / bounds[-1]))
    return Axis(dim, tuple(cells), frozenset(starts))
