"""Append rows to tensors: to embeddings and output heads, for a vocabulary that has grown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from ckptool.commands.merge.expressions import Computation, computed
from ckptool.commands.merge.recipe import Rows
from ckptool.core.casts import can_cast
from ckptool.core.catalog import Catalog, TensorEntry, tied_names
from ckptool.core.quantization.names import quantized_names
from ckptool.core.quantization.scale_names import is_coarse
from ckptool.core.selection import tensors_named
from ckptool.core.text import plural
from ckptool.engine.formulas.rows import MoreRows
from ckptool.errors import Unsupported, UsageError


def append_rows(computation: Computation, changes: Sequence[Rows]) -> Computation:
    """Lengthen tensors to the rows that they are to have; the rows that they have stay.

    Raises UsageError for a name that means no tensor, or one of which another name says another
    count, or one that has more rows; Unsupported for one without floats, and if only some of tied
    tensors would be longer.
    """
    catalog, counts = computation.catalog, dict[str, Rows]()
    for change in changes:
        for name in tensors_named(catalog, [change.name], "--rows"):
            first = counts.setdefault(name, change)
            if first.count != change.count:
                raise UsageError(
                    f"--rows {first.name}={first.count} and {change.name}={change.count}:"
                    f" both mean {name}"
                )
    _require_ties(catalog, counts)
    quantized, longer, texts = quantized_names(catalog), dict[str, TensorEntry](), dict[str, str]()
    for name, rows in counts.items():
        entry = catalog.tensors[name]
        if name in quantized or not can_cast(entry) or is_coarse(entry):
            raise Unsupported(
                f"--rows {rows.name}: {name} ({entry.dtype}, {list(entry.shape)}) has no rows of"
                " plain numbers",
                hint="--dequantize makes such of quantized tensors",
            )
        longer[name] = _lengthen(entry, rows)
        more = plural(rows.count - entry.shape[0], "row")
        texts[name] = f" and {more} of {rows.rule}"
    expressions = tuple(
        replace(e, text=e.text + texts.get(e.name, "")) for e in computation.expressions
    )
    catalog = catalog.with_tensors(catalog.tensors | longer)
    return replace(computation, catalog=catalog, expressions=expressions)


def _lengthen(entry: TensorEntry, rows: Rows) -> TensorEntry:
    has = entry.shape[0]
    if rows.count < has:
        raise UsageError(
            f"--rows {rows.name}={rows.count}: {entry.name} has {has:,} rows, not less"
        )
    if isinstance(rows.fill, int) and rows.fill >= has:
        raise UsageError(f"--fill {rows.rule}: {entry.name} has {has:,} rows, from 0 on")
    if not has:
        raise Unsupported(f"{entry.name}: has no row, of which others could be made")
    template = replace(entry, shape=(rows.count, *entry.shape[1:]))
    formula = MoreRows(rows.fill)
    mean = 8 * math.prod(entry.shape[1:])  # in 64 bits
    return computed(template, [entry], formula, formula.reads, mean)


def _require_ties(catalog: Catalog, names: dict[str, Rows]) -> None:
    """Raise Unsupported if names of one tensor would have other rows afterwards."""
    for group in tied_names(catalog):
        counts = {names[name].count if name in names else None for name in group}
        if len(counts) > 1:
            raise Unsupported(
                f"--rows: {' and '.join(group)} are one tensor, and would be of several sizes",
                hint=" ".join(f"--rows {name}=N" for name in group),
            )
