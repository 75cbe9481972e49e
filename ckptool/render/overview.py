"""The picture of a checkpoint: what it is, what it weighs, its tensors folded, its values."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect import InspectReport, Share
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import short_name
from ckptool.core.parts import part_of
from ckptool.core.quantised import kinds
from ckptool.render.fold import Folded, fold
from ckptool.render.text import bar, columns, magnitude, plural, ranges, size, visible
from ckptool.render.values import telling

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
        more = f"  ... and {len(lines) - most:,} more lines; --tensors '*' lists every tensor"
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
    parts = [part_of(entry) for entry in entries]
    counted = ", ".join(f"{parts.count(part):,} {part}" for part in dict.fromkeys(parts))
    title = Text.assemble(
        (f"  {plural(len(parts), 'value')} besides tensors", "bold"),
        f" ({counted})",
        ("; --values lists them", "dim"),
    )
    rows = [
        [Text(f"  {visible(name)}"), Text(shown, style="cyan")] for name, shown in telling(entries)
    ]
    return [title, *columns(screen, rows, "ll", cuts=0)]
