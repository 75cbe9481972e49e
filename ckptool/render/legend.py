"""What lies where: rank, file, box, byte offset and length of every chunk of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Item, Packed, Place, Scaled, TensorEntry, contiguous
from ckptool.render.text import columns, plural, visible

_MOST_BOXES = 64
_MOST_LINES = 64
_HEADINGS = ("", "rank", "file", "box", "offset", "bytes", "")
_COLOURS = (
    "#5fafff #87d75f #ffaf5f #d787d7 #5fd7d7 #ffd75f #ff8787 #afafff"
    " #afd787 #d7afff #87d7af #d7af87"
).split()


@dataclass(frozen=True, slots=True)
class Spot:
    """One box in one file; ``remark`` says how the bytes lie if not plainly."""

    rank: int | None
    colour: str
    box: Box
    at: Place
    nbytes: int
    remark: str


def colour_of(chunk: Chunk) -> str:
    """The colour of the rank that wrote a chunk."""
    return _colour(chunk.rank)


def _colour(rank: int | None) -> str:
    return "#bcbcbc" if rank is None else _COLOURS[rank % len(_COLOURS)]


def legend_lines(entry: TensorEntry, screen: Console) -> list[Text]:
    """A row a box, replicas included; where they are hundreds, a row for each rank and file."""
    found = list(spots(entry))
    rows = _one_by_one(found) if len(found) <= _MOST_BOXES else _by_file(found)
    most = _MOST_LINES if screen.is_terminal else len(rows)
    heads = [Text(heading, style="dim") for heading in _HEADINGS]
    lines = columns(screen, [heads, *rows[:most]], "lrllrrl", cuts=2)
    if len(rows) > most:
        lines.append(Text(f"  ... and {len(rows) - most:,} more files", style="dim"))
    return lines


def spots(entry: TensorEntry) -> Iterator[Spot]:
    """Every box of a tensor and where it is stored, replicas included."""
    itemsize = entry.source_dtype.itemsize
    for chunk in entry.chunks:
        for rank, at in ((chunk.rank, chunk.at), *((c.rank, c.at) for c in chunk.copies)):
            nbytes, remark = _stored(at, chunk.box, itemsize)
            yield Spot(rank, _colour(rank), chunk.box, at, nbytes, remark)


def _stored(at: Place, box: Box, itemsize: int) -> tuple[int, str]:
    """Bytes in the file, and how they lie."""
    if isinstance(at, Packed):
        return at.nbytes, f"{at.codec}, {at.size:,} bytes decoded"
    if isinstance(at, Item):
        return at.nbytes, "+".join(at.transforms)
    if isinstance(at, Scaled):
        return box.volume * itemsize, "from values and scales"
    strided = not contiguous(at.strides, box.shape, itemsize)
    return box.volume * itemsize, ", ".join([*(["strided"] if strided else []), *at.ops])


def _one_by_one(spots: list[Spot]) -> list[list[Text]]:
    return [
        _row(spot, spot.at.file, _box(spot.box), f"{spot.at.offset:,}", spot.nbytes, spot.remark)
        for spot in spots
    ]


def _by_file(spots: list[Spot]) -> list[list[Text]]:
    groups: dict[tuple[int | None, str], list[Spot]] = {}
    for spot in spots:
        groups.setdefault((spot.rank, spot.at.file), []).append(spot)
    return [_file_row(file, group) for (_, file), group in groups.items()]


def _file_row(file: str, group: list[Spot]) -> list[Text]:
    offsets = sorted(spot.at.offset for spot in group)
    boxes = _box(group[0].box) if len(group) == 1 else plural(len(group), "box")
    span = f"{offsets[0]:,}" + (f" .. {offsets[-1]:,}" if len(group) > 1 else "")
    return _row(group[0], file, boxes, span, sum(spot.nbytes for spot in group), "")


def _row(spot: Spot, file: str, box: str, offset: str, nbytes: int, remark: str) -> list[Text]:
    return [
        Text("  ", style=f"on {spot.colour}"),
        Text("?" if spot.rank is None else str(spot.rank), style="bold"),
        Text(visible(file)),
        Text(box, style="green"),
        Text(offset),
        Text(f"{nbytes:,}"),
        Text(visible(remark), style="dim"),
    ]


def _box(box: Box) -> str:
    return str(box) if box.volume else f"{box} (empty)"
