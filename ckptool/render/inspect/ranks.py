"""How many bytes each rank stored, and how even that is."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.render.text import bar, columns, plural, ranges, size

_BAR = 32

Loads = dict[int, tuple[int, int]]
"""Chunks and bytes by rank."""


def rank_lines(catalog: Catalog, screen: Console) -> list[Text]:
    """A row for each rank, ranks with the same load in one, and max / mean below."""
    loads, unknown = loads_of(catalog)
    if not loads:
        return [Text("  the files do not record which rank wrote them", style="dim")]
    heaviest = max(nbytes for _, nbytes in loads.values())
    alike: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(loads):
        alike.setdefault(loads[rank], []).append(rank)
    rows = [
        [
            Text(heading, style="dim")
            for heading in ("rank", "chunks per rank", "bytes per rank", "")
        ]
    ]
    for (chunks, nbytes), members in alike.items():
        drawn = bar(nbytes / max(heaviest, 1), _BAR, ascii_only=screen.options.ascii_only)
        rows.append(
            [
                Text(ranges(members), style="bold"),
                Text(f"{chunks:,}"),
                Text(size(nbytes)),
                Text(drawn, style="green"),
            ]
        )
    return [*columns(screen, rows, "lrrl", cuts=0), *_summary(loads, unknown)]


def loads_of(catalog: Catalog) -> tuple[Loads, int]:
    """What each rank stored, replicas counted where they lie; and bytes of no known rank."""
    loads: Loads = dict.fromkeys(range(catalog.world_size or 0), (0, 0))
    unknown = 0
    for entry in catalog.tensors.values():
        for rank, nbytes in _stored(entry):
            if rank is None:
                unknown += nbytes
            else:
                chunks, held = loads.get(rank, (0, 0))
                loads[rank] = (chunks + 1, held + nbytes)
    seen = any(chunks for chunks, _ in loads.values())
    return (loads if seen else {}), unknown


def _stored(entry: TensorEntry) -> Iterator[tuple[int | None, int]]:
    for chunk in entry.chunks:
        nbytes = chunk.box.volume * entry.source_dtype.itemsize
        yield chunk.rank, nbytes
        for copy in chunk.copies:
            yield copy.rank, nbytes


def _summary(loads: Loads, unknown: int) -> list[Text]:
    nbytes = [held for _, held in loads.values()]
    mean = sum(nbytes) / len(nbytes)
    told = f"  {plural(len(nbytes), 'rank')}: mean {size(round(mean))}, max {size(max(nbytes))}"
    lines = [Text(told)]
    if mean:
        ratio = max(nbytes) / mean
        style = "green" if ratio < 1.1 else "yellow" if ratio < 1.5 else "red"
        lines[0].append(", imbalance (max / mean) ").append(f"{ratio:.2f}", style=style)
    if unknown:
        lines.append(Text(f"  {size(unknown)} of unknown rank", style="dim"))
    return lines
