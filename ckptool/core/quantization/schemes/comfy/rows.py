"""ComfyUI's FP8, INT8 and rotated weights: one scale for all, or for each row.

Layouts and numbers of ``TensorCoreFP8Layout``, ``TensorWiseINT8Layout`` and
``TensorCoreConvRotW4A4Layout`` of comfy-kitchen (0.2.40), by its eager backend.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.quantization.blocks import ComputeByTorch, read_codes, read_floats
from ckptool.core.quantization.model import Quantized, Surroundings
from ckptool.core.quantization.schemes.comfy.marker import (
    Marker,
    computed_type,
    require_known,
    setting,
)

_INT4_GROUP = 64
_ROTATED = 256
"""The columns that ConvRot rotates together if a marker does not say how many."""
_ROTATION = ("convrot", "convrot_groupsize")
_SIGNS = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))
"""The regular Hadamard matrix of four rows, of whose Kronecker products ConvRot's consist."""


def lay_out_fp8(pair: Quantized, marker: Marker, around: Surroundings) -> TensorEntry:
    """Lay out floats of eight bits with one scale for all or for each row."""
    require_known(pair, marker)
    pair.require_type(pair.values, marker["format"])
    return _lay_out_scaled(pair, _compute_floats, around)


def _lay_out_scaled(pair: Quantized, compute: ComputeByTorch, around: Surroundings) -> TensorEntry:
    """Lay out numbers of a byte each with one scale for all, or a column of scales of rows."""
    pair.require_type(pair.scales, "float")
    shape, grid = pair.values.shape, pair.scales.shape
    is_one = pair.scales.elements == 1 and len(grid) <= max(len(shape), 1)
    if pair.extras or not (is_one or (len(shape) == 2 and grid == (shape[0], 1))):
        raise pair.unfit()
    return pair.numbers(compute, around.dtype, shape, _whole(shape))


def _whole(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block of a tensor that is one block, or whose scales are found otherwise."""
    return tuple(max(size, 1) for size in shape)


def lay_out_int8(pair: Quantized, marker: Marker, around: Surroundings) -> TensorEntry:
    """Lay out integers of eight bits with one scale for all or for each row, maybe rotated."""
    require_known(pair, marker, *_ROTATION)
    pair.require_type(pair.values, "int8")
    is_rotated = setting(marker, "convrot", False)
    if type(is_rotated) is not bool:
        raise pair.unfit(f"its marker says convrot {is_rotated!r}")
    columns = _rotated_columns(pair, marker, pair.values.shape[-1:]) if is_rotated else 0
    return _lay_out_scaled(pair, partial(_compute_integers, rotated=columns), around)


def lay_out_int4(pair: Quantized, marker: Marker, around: Surroundings) -> TensorEntry:
    """Lay out rotated integers of four bits, two per byte, with one scale for each row."""
    require_known(pair, marker, *_ROTATION, "linear_dtype", "quant_group_size")
    pair.require_type(pair.values, "int8")
    pair.require_type(pair.scales, "float")
    shape, size = pair.unpacked_shape, setting(marker, "quant_group_size", _INT4_GROUP)
    if len(shape) != 2 or pair.scales.shape not in ((shape[0],), (shape[0], 1)) or pair.extras:
        raise pair.unfit()
    if size != _INT4_GROUP or shape[1] % _INT4_GROUP:
        raise pair.unfit(f"its groups are of {size} columns, only {_INT4_GROUP} are supported")
    columns = _rotated_columns(pair, marker, shape[-1:])
    compute = partial(_compute_integers, rotated=columns, bits=4)
    return pair.numbers(compute, around.dtype, shape, _whole(shape))


def _rotated_columns(pair: Quantized, marker: Marker, columns: tuple[int, ...]) -> int:
    """Return how many columns are rotated together, a power of four."""
    size = setting(marker, "convrot_groupsize", _ROTATED)
    is_power = type(size) is int and size >= 4 and size.bit_count() == 1 and size.bit_length() % 2
    if not is_power or len(pair.values.shape) != 2 or columns[0] % size:
        raise pair.unfit(f"its rotation of {size} columns does not fit it")
    return int(size)


def _compute_floats(gather: Gather, at: Computed, box: Box, dtype: Any) -> Any:
    """Multiply floats by their scale, both in the requested type."""
    kind = computed_type(dtype)
    numbers = read_floats(gather, at.values, box).to(kind)
    return (numbers * _scales_of_rows(gather, at, box).to(kind)).to(dtype)


def _scales_of_rows(gather: Gather, at: Computed, box: Box) -> Any:
    """Return the one scale, or a column of the rows' scales, in 32 bits."""
    shape = at.scales.shape
    if at.scales.elements == 1:
        return read_floats(gather, at.scales).reshape(())
    rows = Box((box.lo[0], *(0 for _ in shape[1:])), (box.hi[0], *shape[1:]))
    return read_floats(gather, at.scales, rows).reshape(-1, 1)


def _compute_integers(
    gather: Gather, at: Computed, box: Box, dtype: Any, *, rotated: int, bits: int = 8
) -> Any:
    """Multiply integers by their scale, and rotate groups of ``rotated`` columns back, if any.

    The first of two of four bits is in the lower half of a byte; the upper bit of each is its sign.
    """
    import torch

    wide = _whole_groups(box, rotated) if rotated else box
    if bits == 8:
        numbers = read_floats(gather, at.values, wide)
    else:
        codes = read_codes(gather, at.values, wide)
        numbers = torch.where(codes >= 8, codes - 16, codes).to(torch.float32)
    numbers = numbers * _scales_of_rows(gather, at, box)
    return (_rotate_back(numbers, rotated, box, wide) if rotated else numbers).to(dtype)


def _whole_groups(box: Box, size: int) -> Box:
    """Return a box widened to whole groups of columns."""
    lo, hi = box.lo[1] // size * size, -(-box.hi[1] // size) * size
    return Box((box.lo[0], lo), (box.hi[0], hi))


def _rotate_back(numbers: Any, size: int, box: Box, wide: Box) -> Any:
    """Return a box of a matrix whose groups of columns are multiplied by a Hadamard matrix.

    It is symmetric, and its elements are powers of two: only sums are rounded. They are added in
    the order of the columns, as comfy-kitchen's ``matmul`` adds those of two rows and more.
    """
    import torch

    signs = torch.tensor(_SIGNS, dtype=torch.float32)
    matrix = signs
    while len(matrix) < size:
        matrix = torch.kron(matrix, signs)
    groups = (numbers / size**0.5).reshape(-1, size)
    total = torch.zeros_like(groups)
    for column in range(size):
        total.addcmul_(groups[:, column : column + 1], matrix[column])
    rows = total.reshape(numbers.shape)
    return rows[:, box.lo[1] - wide.lo[1] : box.hi[1] - wide.lo[1]]
