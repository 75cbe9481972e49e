"""The overview of a checkpoint: what it is, its size, tensors folded, values, ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.fold import TensorLine, fold
from ckptool.commands.inspect.report import InspectReport, PartShare
from ckptool.commands.inspect.views import Loads, loads_of, sorted_modules
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import short_name
from ckptool.core.quantization.names import kinds
from ckptool.core.state_category import state_category
from ckptool.core.text import magnitude, plural, ranges, size, visible
from ckptool.render.inspect.listing import line_name, metadata_lines, placements_text
from ckptool.render.inspect.values import notable_values
from ckptool.render.reshard import mesh_text
from ckptool.render.text import MOST_LINES, Cell, bar, columns

if TYPE_CHECKING:
    from ckptool.commands.reshard.holdings import MeshHoldings

_PART_COLORS = {"model": "green", "optimizer": "blue", "other": "yellow"}

_BAR = 24
_RANK_BAR = 32
ROOMY = 110
_ROOM_FOR_BARS = 76
_MOST_TEXTS = 8
_SHOWN_APART = ("framework", "version", "parallelism", "step", "arguments")
"""Facts that have lines of their own; all others are the writer's."""


def overview(report: InspectReport, screen: Console, sort: str = "name") -> list[Text]:
    """Return all sections, a blank line between them; tensors by ``name`` or by ``size``."""
    sections = [_header(report, screen), _shares(report, screen)]
    sections += [_tensors(report.catalog, screen, sort), _values(report.catalog, screen)]
    sections.append(metadata_lines(report.catalog, screen, _MOST_TEXTS))
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
    keys = ("framework", "version") if "framework" in info else ()
    framework = " ".join(info[key] for key in keys if key in info)
    facts = [("writer", _writer(info)), ("framework", framework)]
    if report.step is not None:
        facts.append(("step", f"{report.step:,}"))
    if catalog.world_size is not None:
        facts.append(("ranks", f"{catalog.world_size:,}"))
    facts += [("parallel", info.get("parallelism", "")), ("mesh", _mesh(catalog))]
    quantized = ", ".join(f"{plural(n, 'tensor')} {kind}" for kind, n in kinds(catalog).items())
    facts += [("arguments", info.get("arguments", "")), ("quantized", quantized)]
    facts += [("holds", _holds(report))]
    rows = [((label, "dim"), fact) for label, fact in facts if fact]
    return [title, *columns(screen, rows, "ll")]


def _writer(info: dict[str, str]) -> str:
    rest = [f"{key} {value}" for key, value in info.items() if key not in ("writer", *_SHOWN_APART)]
    keys = ("writer",) if "framework" in info else ("writer", "version")
    writer = " ".join(info[key] for key in keys if key in info)
    return ", ".join(filter(None, [writer, *rest]))


def _mesh(catalog: Catalog) -> str:
    mesh = catalog.mesh
    if mesh is None:
        return ""
    described = mesh.words + {"inferred": ", inferred from chunks and writers"}.get(
        catalog.mesh_source or "", f", {catalog.mesh_source}"
    )
    in_order = mesh.ranks == tuple(range(mesh.size))
    return described if in_order else f"{described}; ranks {ranges(mesh.ranks)}"


def _holds(report: InspectReport) -> str:
    totals = report.totals
    parameters = magnitude(totals.parameters) + " parameter" + "s" * (totals.parameters != 1)
    return (
        f"{plural(totals.tensors, 'tensor')} of {size(totals.nbytes)}, {parameters},"
        f" in {plural(totals.files, 'file')}"
    )


def _shares(report: InspectReport, screen: Console) -> list[Text]:
    if not report.shares:
        return []
    total = max(report.totals.nbytes, 1)
    heads = ("part", "dtype", "tensors", "elements", "bytes", "", "")
    rows = [_share(share, total, screen) for share in report.shares]
    return columns(screen, rows, "llrrrrl", heads=heads)


def _share(share: PartShare, total: int, screen: Console) -> list[Cell]:
    part = share.nbytes / total
    color = _PART_COLORS[share.part]
    return [
        (share.part, color),
        (short_name(share.dtype.name), "yellow"),
        f"{share.tensors:,}",
        magnitude(share.elements),
        size(share.nbytes),
        f"{part:.1%}",
        (_bar(part, _BAR, screen), color),
    ]


def _bar(part: float, width: int, screen: Console) -> str:
    """Draw a bar of a share; none if the screen has no room for it."""
    if screen.is_terminal and screen.width < _ROOM_FOR_BARS:
        return ""
    return bar(part, width, ascii_only=screen.options.ascii_only)


def module_lines(
    report: InspectReport, depth: int, screen: Console, sort: str = "name"
) -> list[Text]:
    """Return a row per module, by name or the largest first."""
    modules = sorted_modules(report, depth, sort)
    total = max(report.totals.nbytes, 1)
    rows: list[list[Cell]] = []
    for module in modules:
        part = module.nbytes / total
        rows.append(
            [
                module.module,
                (", ".join(map(short_name, module.dtypes)), "yellow"),
                f"{module.tensors:,}",
                magnitude(module.elements),
                size(module.nbytes),
                f"{part:.1%}",
                (_bar(part, _BAR // 2, screen), "green"),
            ]
        )
    heads = ("module", "dtype", "tensors", "elements", "bytes", "", "")
    return columns(screen, rows, "llrrrrl", heads=heads, cuts=0)


def _tensors(catalog: Catalog, screen: Console, sort: str) -> list[Text]:
    lines = fold(catalog.tensors.values())
    by_size = sort == "size"
    if by_size:
        lines.sort(key=lambda line: -line.entry.nbytes * line.count)
    most = MOST_LINES if screen.is_terminal else len(lines)
    brief = screen.is_terminal and screen.width < ROOMY
    rows = [_tensor(line, screen, brief) for line in lines[:most]]
    sizes: list[Cell] = [(size(line.entry.nbytes * line.count), "bold") for line in lines[:most]]
    if by_size:
        rows = [[*row, nbytes] for row, nbytes in zip(rows, sizes, strict=True)]
    drawn = columns(screen, rows, "llllrr" if by_size else "llllr", cuts=0)
    result = drawn[:1]
    for above, below, text in zip(lines, lines[1:], drawn[1:], strict=False):
        result += [text] if by_size or above.part == below.part else [Text(), text]
    if len(lines) > most:
        more = f"  ... and {len(lines) - most:,} more lines; use --tensors '*' to list all tensors"
        result.append(Text(more, style="dim"))
    return result


def _tensor(line: TensorLine, screen: Console, brief: bool) -> list[Cell]:
    entry = line.entry
    return [
        line_name(line, screen, brief),
        (str(list(entry.shape)), "green"),
        (short_name(entry.dtype.name), "yellow"),
        _placements(entry, brief),
        (f"x{line.count}" if line.count > 1 else "", "bold"),
    ]


def _placements(entry: TensorEntry, brief: bool) -> Cell:
    """Return the placements, or the number of chunks if no placement is known."""
    if entry.placements is None:
        chunks = len(entry.chunks)
        return plural(chunks, "chunk") if chunks != 1 else "", "dim"
    return placements_text(entry.placements, brief), "magenta"


def _values(catalog: Catalog, screen: Console) -> list[Text]:
    if not catalog.objects:
        return []
    entries = catalog.objects.values()
    parts = [state_category(entry) for entry in entries]
    counts = ", ".join(f"{parts.count(part):,} {part}" for part in dict.fromkeys(parts))
    title = Text.assemble(
        (f"  {plural(len(parts), 'non-tensor value')}", "bold"),
        f" ({counts})",
        ("; use --values to list them", "dim"),
    )
    rows = [(f"  {name}", (shown, "cyan")) for name, shown in notable_values(entries)]
    return [title, *columns(screen, rows, "ll", cuts=0)]


# Bytes per rank


def rank_lines(catalog: Catalog, screen: Console) -> list[Text]:
    """Return a row per rank, ranks with the same load joined, and max / mean below."""
    loads, unknown = loads_of(catalog)
    if not loads:
        return [Text("  the files do not record which rank wrote them", style="dim")]
    return _load_lines(loads, unknown, "chunks", screen)


def mesh_lines(holdings: MeshHoldings, screen: Console) -> list[Text]:
    """Return how tensors would be placed on another mesh, and a row for each of its ranks."""
    counts = Counter((choice.placements, choice.reason) for choice in holdings.choices.values())
    rows = [
        (f"{count:,}", (", ".join(map(str, placements)), "magenta"), (f"({reason})", "dim"))
        for (placements, reason), count in counts.most_common(8)
    ]
    lines = columns(screen, rows, "rll", heads=("tensors", "placements", ""))
    loads = dict(enumerate(holdings.loads))
    title = Text.assemble("  on mesh ", (visible(mesh_text(holdings.mesh)), "bold"))
    return [title, *lines, Text(), *_load_lines(loads, 0, "tensors", screen)]


def _load_lines(loads: Loads, unknown: int, what: str, screen: Console) -> list[Text]:
    heaviest = max(nbytes for _, nbytes in loads.values())
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(loads):
        groups.setdefault(loads[rank], []).append(rank)
    rows: list[list[Cell]] = []
    for (chunks, nbytes), members in groups.items():
        drawn = _bar(nbytes / max(heaviest, 1), _RANK_BAR, screen)
        rows.append([(ranges(members), "bold"), f"{chunks:,}", size(nbytes), (drawn, "green")])
    heads = ("rank", f"{what} per rank", "bytes per rank", "")
    return [*columns(screen, rows, "lrrl", heads=heads, cuts=0), *_imbalance(loads, unknown)]


def _imbalance(loads: Loads, unknown: int) -> list[Text]:
    nbytes = [total for _, total in loads.values()]
    mean = sum(nbytes) / len(nbytes)
    ranks = plural(len(nbytes), "rank")
    lines = [Text(f"  {ranks}: mean {size(round(mean))}, max {size(max(nbytes))}")]
    if mean:
        ratio = max(nbytes) / mean
        style = "green" if ratio < 1.1 else "yellow" if ratio < 1.5 else "red"
        lines[0].append(", imbalance (max / mean) ").append(f"{ratio:.2f}", style=style)
    if unknown:
        lines.append(Text(f"  {size(unknown)} of unknown rank", style="dim"))
    return lines
