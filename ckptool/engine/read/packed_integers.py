"""Integers packed into 32-bit words, lowest bits first: unpack and dequantize them.

compressed-tensors packs along the columns, with half of the range added. AutoGPTQ packs along the
inputs, which are the columns of the weight; AutoAWQ along the outputs, its rows, in another order.
Both store the weight transposed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptool.core.box import Box
from ckptool.core.catalog import ScaledBlocks, TensorEntry
from ckptool.core.quantization.blocks import Gather, blocks_of, read_floats, spread, spread_scales
from ckptool.errors import Damaged, Unsupported

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of AutoAWQ's eight 4-bit integers (``packing_utils``)."""
_WORD = 32


def dequantize_packed(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Subtract the zero points of packed integers, if any, and multiply by scales, in 32 bits.

    Integers are packed along the columns, zero points along the rows. With an order of groups, a
    column has the scale and the zero point of its group (compressed-tensors before 0.13).
    """
    (bits,) = map(int, at.settings)
    half = 1 << (bits - 1)
    numbers = _unpack(gather, at.values, box, -1, bits) - half
    named = {entry.name.endswith("_g_idx"): entry for entry in at.others}
    zeros, order = named.get(False), named.get(True)
    which = None if order is None else _groups(gather, order, box.lo[-1], box.hi[-1], at)
    if which is None:
        if zeros is not None:
            grid = blocks_of(box, at.block)
            numbers = numbers - spread(_unpack(gather, zeros, grid, -2, bits) - half, at, box)
        return (numbers.to(_floats()) * spread_scales(gather, at, box)).to(wanted)
    low, high = int(which.min()), int(which.max()) + 1
    rows = Box((*box.lo[:-1], low), (*box.hi[:-1], high))
    scales = read_floats(gather, at.scales, rows).index_select(-1, which - low)
    if zeros is not None:
        points = _unpack(gather, zeros, rows, -2, bits) - half
        numbers = numbers - points.index_select(-1, which - low)
    return (numbers.to(_floats()) * scales).to(wanted)


def dequantize_gptq(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Subtract the zero points of GPTQ's integers, and multiply by scales, in 32 bits.

    A column has the scale of the group in ``g_idx``, or of its block. AutoGPTQ adds one to a stored
    zero point; if that overflows its bits, AutoGPTQ (0.7) and GPTQModel, which carries into the
    next zero point, differ: Unsupported.
    """
    bits, added = map(int, at.settings)
    zeros, *order = at.others
    (first, start), (last, stop) = box.lo, box.hi
    numbers = _unpack(gather, at.values, Box((start, first), (stop, last)), 0, bits)
    which = _order(gather, order[0], start, stop, at) if order else _blocks(start, stop, at)
    low, high = int(which.min()), int(which.max()) + 1
    groups = Box((low, first), (high, last))
    points = _unpack(gather, zeros, groups, 1, bits) + added
    if added and int(points.max()) >> bits:
        raise Unsupported(
            f"{zeros.name}: a zero point of {(1 << bits) - 1}, which readers of GPTQ add one to in"
            " different ways",
            hint=f"use --drop '{zeros.name.removesuffix('.qzeros')}.*' to exclude it",
        )
    scales = read_floats(gather, at.scales, groups)
    result = (numbers - points[which - low]).to(_floats()) * scales[which - low]
    return result.T.to(wanted)


def dequantize_awq(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Subtract the zero points of AWQ's integers, and multiply by scales, in 32 bits."""
    (first, start), (last, stop) = box.lo, box.hi
    numbers = _unpack_awq(gather, at.values, Box((start, first), (stop, last)))
    which = _blocks(start, stop, at)
    low, high = int(which.min()), int(which.max()) + 1
    groups = Box((low, first), (high, last))
    points = _unpack_awq(gather, at.others[0], groups)
    scales = read_floats(gather, at.scales, groups)
    result = (numbers - points[which - low]).to(_floats()) * scales[which - low]
    return result.T.to(wanted)


def _floats() -> Any:
    import torch

    return torch.float32


def _blocks(start: int, stop: int, at: ScaledBlocks) -> Any:
    """Return the group of each column if groups are consecutive columns."""
    import torch

    return torch.arange(start, stop) // at.block[-1]


def _order(gather: Gather, order: TensorEntry, start: int, stop: int, at: ScaledBlocks) -> Any:
    """Read the group of each column. Raises Damaged for a group number out of range."""
    import torch

    stored = np.ascontiguousarray(gather(order, Box((start,), (stop,))))
    which = torch.from_numpy(stored.view(f"<i{order.dtype.itemsize}").astype(np.int64))
    count = at.scales.shape[-1 if order.name.endswith("weight_g_idx") else 0]
    if bool(((which < 0) | (which >= count)).any()):
        raise Damaged(f"{order.name}: group number outside the {count:,} groups", tensor=order.name)
    return which


def _groups(gather: Gather, order: TensorEntry, start: int, stop: int, at: ScaledBlocks) -> Any:
    """Read the groups of columns in compressed-tensors' order; None if it has none.

    -1 means no order. Raises Damaged if groups differ in size, as the scale of a column is then
    undefined.
    """
    import torch

    columns = at.part.shape[-1]
    stored = np.ascontiguousarray(gather(order, Box((0,), (columns,)))).view("<i4")
    if (stored == -1).any():
        return None
    count = at.scales.shape[-1]
    inside = bool(((stored >= 0) & (stored < count)).all())
    if not inside or (np.bincount(stored, minlength=count) != at.block[-1]).any():
        message = f"{order.name}: not {count:,} groups of {at.block[-1]:,} columns each"
        raise Damaged(message, tensor=order.name)
    return torch.from_numpy(stored[start:stop].astype(np.int64))


def _unpack(gather: Gather, words: TensorEntry, box: Box, dim: int, bits: int) -> Any:
    """Return a box of the integers packed along a dim, as 32-bit integers.

    If their width does not divide a word, they continue in the next word.
    """
    import torch

    lo, hi = list(box.lo), list(box.hi)
    begin, end = box.lo[dim] * bits, box.hi[dim] * bits
    lo[dim], hi[dim] = begin // _WORD, -(-end // _WORD)
    wide = _words(gather, words, Box(tuple(lo), tuple(hi))).movedim(dim, -1)
    mask = (1 << bits) - 1
    if _WORD % bits == 0:
        integers = ((wide.unsqueeze(-1) >> torch.arange(0, _WORD, bits)) & mask).flatten(-2)
        first = (begin - lo[dim] * _WORD) // bits
        kept = integers[..., first : first + box.shape[dim]]
    else:
        at = torch.arange(begin, end, bits) - lo[dim] * _WORD
        low, shift = at // _WORD, at % _WORD
        following = wide.roll(-1, -1).index_select(-1, low)
        kept = ((wide.index_select(-1, low) | (following << _WORD)) >> shift) & mask
    return kept.to(torch.int32).movedim(-1, dim)


def _unpack_awq(gather: Gather, words: TensorEntry, box: Box) -> Any:
    """Return a box of the integers of four bits that AutoAWQ packs along the columns."""
    import torch

    each = len(_AWQ_ORDER)
    lo, hi = box.lo[1] // each, -(-box.hi[1] // each)
    wide = _words(gather, words, Box((box.lo[0], lo), (box.hi[0], hi))).unsqueeze(-1)
    shifts = torch.tensor(_AWQ_ORDER) * (_WORD // each)
    integers = ((wide >> shifts) & 0x0F).flatten(-2)
    first = box.lo[1] - lo * each
    return integers[:, first : first + box.shape[1]].to(torch.int32)


def _words(gather: Gather, entry: TensorEntry, box: Box) -> Any:
    """Read words of 32 bits as integers of 64."""
    import torch

    stored = np.ascontiguousarray(gather(entry, box)).view("<u4")
    return torch.from_numpy(stored.astype(np.int64))
