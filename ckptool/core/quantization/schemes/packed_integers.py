"""compressed-tensors' integers in 32-bit words, packed along the columns (0.20).

``X.weight_packed`` with ``X.weight_scale`` and ``X.weight_shape``, maybe with zero points and an
order of the columns. Half of the range is added to the integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Computed, Gather, TensorEntry
from ckptool.core.quantization.blocks import (
    blocks_of,
    read_floats,
    read_order,
    spread,
    unpack,
)
from ckptool.core.quantization.model import Kind, Quantized, Scheme, Surroundings, part_of_row
from ckptool.errors import Damaged

_KIND = Kind("packed integers", "compressed-tensors", "pack-quantized")
_PACKED = ".weight_packed"
_BITS = (4, 8)
"""Widths that the tensors determine; others come from ``num_bits`` of quantization_config."""
_REORDERED = ("true", "group", "dynamic")
"""compressed-tensors' (0.20) names for groups of columns in another order than stored."""


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield integers in words, if all tensors that their numbers need exist."""
    tensors = catalog.tensors
    for name in names:
        values, weight = tensors[name], name.removesuffix("_packed")
        parts = ("scale", "shape", "zero_point", "g_idx")
        scales, sizes, *rest = (tensors.get(f"{weight}_{part}") for part in parts)
        is_packed = values.dtype.name == "int32" and len(values.shape) > 1
        if is_packed and scales is not None and sizes is not None:
            extras = tuple(entry for entry in rest if entry is not None)
            yield Quantized(_KIND, weight, values, scales, _lay_out, extras, about=(sizes,))


def _lay_out(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out integers that are packed in words, each row of a tensor by itself.

    The shape and the words of a row determine how many a word has.
    """
    pair.require_type(pair.scales, "float")
    shape = _shape(pair.about[0], around)
    words, grid = pair.values.shape, pair.scales.shape
    group = around.config.group_of(pair.module)
    weights = group.weights
    bits = weights.get("num_bits")
    candidates = (bits,) if type(bits) is int and 1 < bits < 8 and bits not in _BITS else _BITS
    fits = [n for n in candidates if shape and words == (*shape[:-1], -(-shape[-1] * n // 32))]
    if fits and 32 % fits[0] and 1 < words[-1] == -(-shape[-1] // (32 // fits[0])):
        raise pair.unfit("compressed-tensors before 0.13 has as many words, in another order")
    columns = grid[-1] if len(grid) == len(shape) and grid[:-1] == shape[:-1] else 0
    if len(fits) != 1 or not columns or shape[-1] % columns:
        raise pair.unfit()
    bits, block = fits[0], part_of_row(shape, shape[-1] // columns)
    pair.require_settings(group, num_bits=bits, group_size=block[-1], type="int")
    pair.require_strategy(group, shape, block)
    parts = {entry.name.removeprefix(f"{pair.name}_") for entry in pair.extras}
    if weights.get("symmetric") is False and "zero_point" not in parts:
        raise pair.unfit(f"{group} says symmetric False, but no {pair.name}_zero_point")
    if str(weights.get("actorder")).lower() in _REORDERED and "g_idx" not in parts:
        raise pair.unfit(f"{group} says actorder {weights['actorder']}, but no {pair.name}_g_idx")
    zeros = (*shape[:-2], -(-shape[-2] * bits // 32), columns) if len(shape) > 1 else ()
    for entry in pair.extras:
        part_shape = (shape[-1],) if entry.name.endswith("_g_idx") else zeros
        if entry.shape != part_shape or entry.dtype.name != "int32":
            raise pair.unfit()
    return pair.numbers(partial(_compute, bits=bits), around.dtype, shape, block)


def _shape(entry: TensorEntry, around: Surroundings) -> tuple[int, ...]:
    """Return the shape stored in a tensor; empty if there is none."""
    if entry.dtype.kind != "int" or len(entry.shape) != 1:
        return ()
    stored, size = around.read(entry), entry.dtype.itemsize
    starts = range(0, len(stored), size)
    return tuple(int.from_bytes(stored[at : at + size], "little", signed=True) for at in starts)


def _compute(gather: Gather, at: Computed, box: Box, dtype: Any, *, bits: int) -> Any:
    """Subtract the zero points of integers of ``bits``, if any, and multiply by scales, in 32 bits.

    Integers are packed along the columns, zero points along the rows. With an order of groups, a
    column has the scale and the zero point of its group (compressed-tensors before 0.13).
    """
    import torch

    half = 1 << (bits - 1)
    numbers = unpack(gather, at.values, box, -1, bits) - half
    extras = {entry.name.endswith("_g_idx"): entry for entry in at.extras}
    zeros, order = extras.get(False), extras.get(True)
    rows, pick = blocks_of(box, at.block), partial(spread, block=at.block, box=box)
    column_groups = None if order is None else _groups(gather, order, box.lo[-1], box.hi[-1], at)
    if column_groups is not None:
        low, high = int(column_groups.min()), int(column_groups.max()) + 1
        rows = Box((*box.lo[:-1], low), (*box.hi[:-1], high))
        pick = partial(torch.index_select, dim=len(rows.lo) - 1, index=column_groups - low)
    if zeros is not None:
        numbers = numbers - pick(unpack(gather, zeros, rows, -2, bits) - half)
    return (numbers.to(torch.float32) * pick(read_floats(gather, at.scales, rows))).to(dtype)


def _groups(gather: Gather, order: TensorEntry, start: int, stop: int, at: Computed) -> Any:
    """Read the groups of columns in compressed-tensors' order; None if it has none.

    -1 means no order. Raises Damaged if groups differ in size, as the scale of a column is then
    undefined.
    """
    stored, count = read_order(gather, order, 0, at.part.shape[-1]), at.scales.shape[-1]
    if (stored == -1).any():
        return None
    inside = bool(((stored >= 0) & (stored < count)).all())
    if not inside or (stored.bincount(minlength=count) != at.block[-1]).any():
        message = f"{order.name}: not {count:,} groups of {at.block[-1]:,} columns each"
        raise Damaged(message, tensor=order.name)
    return stored[start:stop]


SCHEME = Scheme(
    find,
    (_PACKED,),
    (_KIND,),
    {
        "compressed-tensors, packed": "weight_packed",
        "compressed-tensors, reordered": "weight_g_idx",
    },
)
