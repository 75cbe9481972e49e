"""Statistics of tensors as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ckptool.core.dtype import short_name
from ckptool.render.text import columns, visible

if TYPE_CHECKING:
    from ckptool.commands.inspect.stats import Number, TensorStats

_HEADINGS = ("name", "shape", "dtype", "min", "max", "mean", "std", "zeros", "nan", "inf")


def stats_lines(stats: Sequence[TensorStats], console: Console) -> list[Text]:
    """One row a tensor; NaN and Inf in red where there are any."""
    rows = [[Text(heading, style="dim") for heading in _HEADINGS]]
    rows += [_row(item) for item in stats]
    lines = columns(console, rows, "lllrrrrrrr", cuts=0)
    if any(item.entry.dtype.kind == "complex" for item in stats):
        lines.append(Text("  complex numbers: statistics of their magnitudes", style="dim"))
    return lines


def _row(item: TensorStats) -> list[Text]:
    entry = item.entry
    return [
        Text(visible(entry.name)),
        Text(str(list(entry.shape)), style="green"),
        Text(short_name(entry.dtype.name), style="yellow"),
        *(Text(_number(n)) for n in (item.minimum, item.maximum, item.mean, item.std)),
        Text(_count(item.zeros)),
        *(Text(_count(n), style="bold red" if n else "dim") for n in (item.nan, item.inf)),
    ]


def _number(value: Number | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def stats_json(stats: Sequence[TensorStats]) -> dict[str, Any]:
    """``{"stats": [...]}``; null where there is no (finite) number to tell."""
    return {"stats": [_json(item) for item in stats]}


def _json(item: TensorStats) -> dict[str, Any]:
    return {
        "name": item.entry.name,
        "of": "magnitudes" if item.entry.dtype.kind == "complex" else "values",
        "min": _finite(item.minimum),
        "max": _finite(item.maximum),
        "mean": _finite(item.mean),
        "std": _finite(item.std),
        "zeros": item.zeros,
        "nan": item.nan,
        "inf": item.inf,
    }


def _finite(value: Number | None) -> Number | None:
    return value if value is None or math.isfinite(value) else None
