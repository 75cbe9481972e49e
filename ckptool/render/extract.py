"""Extracted tensors: their numbers, or the file they were written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from ckptool.commands.document import document
from ckptool.core.dtype import short_name
from ckptool.core.text import plural, size, visible
from ckptool.errors import Unsupported
from ckptool.render.text import console, emit

if TYPE_CHECKING:
    from ckptool.commands.extract import Extraction, ExtractReport, TensorSlice, Values

MOST_IN_JSON = 1_000_000
_WIDEST = 120


def show_values(read: Sequence[Values]) -> None:
    """Show each slice: its description, then its numbers as numpy prints them."""
    screen = console()
    width = min(screen.width, _WIDEST)
    lines: list[Text] = []
    for values in read:
        lines += [*([Text()] if lines else []), _heading(values.slice)]
        lines += [Text(line, "cyan") for line in _text(values, width).splitlines()]
    emit(screen, lines)


def _text(values: Values, width: int) -> str:
    """Return the numbers with enough digits to distinguish them, ``...`` for those not read."""
    most = values.numbers.size if values.full else 0
    return np.array2string(
        values.numbers,
        max_line_width=width,
        threshold=most,
        edgeitems=values.edge,
        floatmode="unique",
    )


def _heading(part: TensorSlice) -> Text:
    entry = part.entry
    text = Text.assemble((visible(entry.name), "bold"), (visible(part.subscript), "bold cyan"))
    text.append("  ").append(str(list(entry.shape)), "green")
    if part.subscript:
        text.append(f" of {list(part.of)}", "dim")
    text.append("  ").append(short_name(entry.dtype.name), "yellow")
    return text.append(f"  {size(entry.nbytes)}")


def show_extract(report: ExtractReport) -> None:
    """Show a line for the file, and if it has several tensors, one for each."""
    screen = console()
    count = plural(len(report.slices), "tensor")
    head = Text.assemble("wrote ", (visible(str(report.target)), "bold"))
    head.append(f" ({report.target_format}): {count}, {size(report.write_bytes)},")
    head.append(f" from {report.source_format}")
    lines = [Text("  ").append_text(_heading(part)) for part in report.slices]
    emit(screen, [head, *lines])


def values_json(extraction: Extraction, read: Sequence[Values]) -> dict[str, Any]:
    """Return the numbers as ``ckptool.extract/2``; complex ones as ``[real, imaginary]``.

    Raises Unsupported if there are more than MOST_IN_JSON of a tensor.
    """
    tensors = []
    for values in read:
        if not values.full:
            raise Unsupported(
                f"{values.slice.entry.name}: {values.slice.entry.elements:,} elements, more than"
                f" the {MOST_IN_JSON:,} of --json",
                hint="take a slice, or write a file with --out",
            )
        numbers = values.numbers
        if numbers.dtype.kind == "c":
            numbers = np.stack([numbers.real, numbers.imag], -1)
        tensors.append(values.slice.to_dict() | {"values": numbers.tolist()})
    head = {"source": extraction.opened.path, "source_format": extraction.opened.format.name}
    return document("extract", **head, tensors=tensors)
