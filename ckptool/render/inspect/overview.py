"""The picture of a checkpoint: what it is, what it weighs, its tensors folded, its values.

What lies where: rank, file, box, byte offset and length of every chunk of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.inspect import InspectReport, Share
from ckptool.core.box import Box
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Container,
    EncodedBlob,
    Place,
    Scaled,
    TensorEntry,
    contiguous,
)
from ckptool.core.dtype import short_name
from ckptool.core.quantization import kinds
from ckptool.core.state_category import state_category
from ckptool.render.inspect.listing import Folded, fold
from ckptool.render.inspect.values import notable_values
from ckptool.render.text import bar, columns, magnitude, plural, ranges, size, visible

PART_COLOURS = {"model": "green", "optimizer": "blue", "other": "yellow"}

_MOST_LINES = 200
_BAR = 24
_ROOMY = 110
_STATES = re.compile(r"\{[A-Za-z][^{}]*\}$")
_ROWS = ("framework", "version", "parallelism", "step", "arguments")
_BRIEF = {"Shard": "S", "StridedShard": "_S", "Partial": "P", "Replicate()": "R"}


def overview(report: InspectReport, screen: Console) -> list[Text]:
    """All sections, a blank line between them."""
    sections = [_header(report, screen), _shares(report, screen)]
    sections += [_tensors(report.catalog, screen), _values(report.catalog, screen)]
    lines: list[Text] = []
    for section in filter(None, sections):
        lines += [*([Text()] if lines else []), *section]
    return lines


def _header(report: InspectReport, screen: Console) -> list[Text]:
    catalog = report.catalog
    title = Text.assemble(
        (visible(str(report.path)), "bold"), "  ", (f"{catalog.format}", "bold cyan")
    )
    info = catalog.info
    facts = [("writer", _writer(info)), ("framework", _framework(info))]
    if report.step is not None:
        facts.append(("step", f"{report.step:,}"))
    if catalog.world_size is not None:
        facts.append(("ranks", f"{catalog.world_size:,}"))
    facts += [("parallel", info.get("parallelism", "")), ("mesh", _mesh(catalog))]
    quantised = ", ".join(f"{plural(n, 'tensor')} {kind}" for kind, n in kinds(catalog).items())
    facts += [("arguments", info.get("arguments", "")), ("quantised", quantised)]
    facts += [("holds", _holds(report))]
    rows = [(Text(label, style="dim"), Text(visible(fact))) for label, fact in facts if fact]
    return [title, *columns(screen, rows, "ll")]


def _writer(info: dict[str, str]) -> str:
    rest = [f"{key} {value}" for key, value in info.items() if key not in ("writer", *_ROWS)]
    named = ("writer",) if "framework" in info else ("writer", "version")
    writer = " ".join(info[key] for key in named if key in info)
    return ", ".join(filter(None, [writer, *rest]))


def _framework(info: dict[str, str]) -> str:
    named = ("framework", "version") if "framework" in info else ()
    return " ".join(info[key] for key in named if key in info)


def _mesh(catalog: Catalog) -> str:
    mesh = catalog.mesh
    if mesh is None:
        return ""
    shape = " x ".join(map(str, mesh.shape))
    if mesh.names:
        shape = " x ".join(f"{n} {s}" for n, s in zip(mesh.names, mesh.shape, strict=True))
    told = shape + {"inferred": ", inferred from chunks and writers"}.get(
        catalog.mesh_source or "", f", {catalog.mesh_source}"
    )
    in_order = mesh.ranks == tuple(range(mesh.size))
    return told if in_order else f"{told}; ranks {ranges(mesh.ranks)}"


def _holds(report: InspectReport) -> str:
    totals = report.totals
    parameters = magnitude(totals.parameters) + " parameter" + "s" * (totals.parameters != 1)
    return (
        f"{plural(totals.tensors, 'tensor')}, {parameters}, {size(totals.nbytes)}"
        f" in {plural(totals.files, 'file')}"
    )


def _shares(report: InspectReport, screen: Console) -> list[Text]:
    if not report.shares:
        return []
    whole = max(report.totals.nbytes, 1)
    heads = ("part", "dtype", "tensors", "elements", "bytes", "", "")
    rows = [[Text(head, style="dim") for head in heads]]
    rows += [_share(share, whole, screen) for share in report.shares]
    return columns(screen, rows, "llrrrrl")


def _share(share: Share, whole: int, screen: Console) -> list[Text]:
    part = share.nbytes / whole
    colour = PART_COLOURS[share.part]
    return [
        Text(share.part, style=colour),
        Text(short_name(share.dtype.name), style="yellow"),
        Text(f"{share.tensors:,}"),
        Text(magnitude(share.elements)),
        Text(size(share.nbytes)),
        Text(f"{part:.1%}"),
        Text(bar(part, _BAR, ascii_only=screen.options.ascii_only), style=colour),
    ]


def _tensors(catalog: Catalog, screen: Console) -> list[Text]:
    lines = fold(catalog.tensors.values())
    most = _MOST_LINES if screen.is_terminal else len(lines)
    brief = screen.is_terminal and screen.width < _ROOMY
    drawn = columns(screen, [_tensor(line, brief) for line in lines[:most]], "llllr", cuts=0)
    found = drawn[:1]
    for above, below, text in zip(lines, lines[1:], drawn[1:], strict=False):
        found += [text] if above.part == below.part else [Text(), text]
    if len(lines) > most:
        more = f"  ... and {len(lines) - most:,} more lines; use --tensors '*' to list all tensors"
        found.append(Text(more, style="dim"))
    return found


def _tensor(line: Folded, brief: bool) -> list[Text]:
    entry = line.entry
    return [
        _name(_STATES.sub("{…}", line.name) if brief else line.name),
        Text(str(list(entry.shape)), style="green"),
        Text(short_name(entry.dtype.name), style="yellow"),
        _placements(entry, brief),
        Text(f"x{line.count}" if line.count > 1 else "", style="bold"),
    ]


def _name(name: str) -> Text:
    text = Text(visible(name))
    text.highlight_regex(r"\{[^{}]*\}|(?<![^.])\*(?![^.])", "bold cyan")
    return text


def _placements(entry: TensorEntry, brief: bool) -> Text:
    """The placements, or the number of chunks where no placement is known."""
    if entry.placements is None:
        chunks = len(entry.chunks)
        return Text(plural(chunks, "chunk") if chunks != 1 else "", style="dim")
    names = ", ".join(map(str, entry.placements))
    if brief:
        names = re.sub(r"Replicate\(\)|[A-Z]\w+", lambda found: _BRIEF[found[0]], names)
    return Text(names, style="magenta")


def _values(catalog: Catalog, screen: Console) -> list[Text]:
    if not catalog.objects:
        return []
    entries = catalog.objects.values()
    parts = [state_category(entry) for entry in entries]
    counted = ", ".join(f"{parts.count(part):,} {part}" for part in dict.fromkeys(parts))
    title = Text.assemble(
        (f"  {plural(len(parts), 'non-tensor value')}", "bold"),
        f" ({counted})",
        ("; use --values to list them", "dim"),
    )
    rows = [
        [Text(f"  {visible(name)}"), Text(shown, style="cyan")]
        for name, shown in notable_values(entries)
    ]
    return [title, *columns(screen, rows, "ll", cuts=0)]


_MOST_BOXES = 64
_MOST_LEGEND_LINES = 64
_HEADINGS = ("", "rank", "file", "box", "offset", "bytes", "")
_COLOURS = (
    "#5fafff #87d75f #ffaf5f #d787d7 #5fd7d7 #ffd75f #ff8787 #afafff"
    " #afd787 #d7afff #87d7af #d7af87"
).split()


@dataclass(frozen=True, slots=True)
class ChunkLocation:
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
    most = _MOST_LEGEND_LINES if screen.is_terminal else len(rows)
    heads = [Text(heading, style="dim") for heading in _HEADINGS]
    lines = columns(screen, [heads, *rows[:most]], "lrllrrl", cuts=2)
    if len(rows) > most:
        lines.append(Text(f"  ... and {len(rows) - most:,} more files", style="dim"))
    return lines


def spots(entry: TensorEntry) -> Iterator[ChunkLocation]:
    """Every box of a tensor and where it is stored, replicas included."""
    itemsize = entry.source_dtype.itemsize
    for chunk in entry.chunks:
        for rank, at in ((chunk.rank, chunk.at), *((c.rank, c.at) for c in chunk.copies)):
            nbytes, remark = _stored(at, chunk.box, itemsize)
            yield ChunkLocation(rank, _colour(rank), chunk.box, at, nbytes, remark)


def _stored(at: Place, box: Box, itemsize: int) -> tuple[int, str]:
    """Bytes in the file, and how they lie."""
    if isinstance(at, EncodedBlob):
        return at.nbytes, f"{at.codec}, {at.size:,} bytes decoded"
    if isinstance(at, Container):
        return at.nbytes, "+".join(at.transforms)
    if isinstance(at, Scaled):
        return box.volume * itemsize, "from values and scales"
    strided = not contiguous(at.strides, box.shape, itemsize)
    return box.volume * itemsize, ", ".join([*(["strided"] if strided else []), *at.ops])


def _one_by_one(spots: list[ChunkLocation]) -> list[list[Text]]:
    return [
        _row(spot, spot.at.file, _box(spot.box), f"{spot.at.offset:,}", spot.nbytes, spot.remark)
        for spot in spots
    ]


def _by_file(spots: list[ChunkLocation]) -> list[list[Text]]:
    groups: dict[tuple[int | None, str], list[ChunkLocation]] = {}
    for spot in spots:
        groups.setdefault((spot.rank, spot.at.file), []).append(spot)
    return [_file_row(file, group) for (_, file), group in groups.items()]


def _file_row(file: str, group: list[ChunkLocation]) -> list[Text]:
    offsets = sorted(spot.at.offset for spot in group)
    boxes = _box(group[0].box) if len(group) == 1 else plural(len(group), "box")
    span = f"{offsets[0]:,}" + (f" .. {offsets[-1]:,}" if len(group) > 1 else "")
    return _row(group[0], file, boxes, span, sum(spot.nbytes for spot in group), "")


def _row(
    spot: ChunkLocation, file: str, box: str, offset: str, nbytes: int, remark: str
) -> list[Text]:
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
