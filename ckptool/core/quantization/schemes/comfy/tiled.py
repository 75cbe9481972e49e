"""ComfyUI's MXFP8 and NVFP4: scales of groups of a row, in the tiles of tensor cores.

Layouts and numbers of ``TensorCoreMXFP8Layout`` and ``TensorCoreNVFP4Layout`` of comfy-kitchen
(0.2.40), by its eager backend. Rows and columns that only fill tiles are stored like all others.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.blocks import (
    FP4,
    ComputeByTorch,
    read_codes,
    read_floats,
    view_typed,
)
from ckptool.core.quantization.model import Quantized, Surroundings
from ckptool.core.quantization.schemes.comfy.marker import (
    Marker,
    computed_type,
    require_known,
    setting,
)

_ROW_TILE, _COLUMN_TILE, _TILE_PART = 128, 4, 32
"""cuBLAS's tiles of block scales: 128 rows of 4 scales, the rows 32 apart beside each other."""
_MX_GROUP, _NV_GROUP = 32, 16


def lay_out_mxfp8(pair: Quantized, marker: Marker, around: Surroundings) -> TensorEntry:
    """Lay out floats of eight bits with an exponent per 32 of a row."""
    require_known(pair, marker, "group_size")
    pair.require_type(pair.values, "float8_e4m3fn")
    pair = replace(pair, scales=replace(pair.scales, dtype=BY_NAME["uint8"]))
    return _lay_out_tiled(pair, marker, around, _compute_mxfp8, _MX_GROUP)


def lay_out_nvfp4(pair: Quantized, marker: Marker, around: Surroundings) -> TensorEntry:
    """Lay out floats of four bits, the first of two in the upper half of a byte."""
    require_known(pair, marker, "group_size")
    pair.require_type(pair.values, "uint8")
    if len(pair.extras) != 1 or pair.extras[0].elements != 1:
        raise pair.unfit(f"it has no {pair.name}_scale_2 of one element")
    pair.require_type(pair.extras[0], "float")
    pair = replace(pair, scales=replace(pair.scales, dtype=BY_NAME["float8_e4m3fn"]))
    return _lay_out_tiled(pair, marker, around, _compute_nvfp4, _NV_GROUP)


def _lay_out_tiled(
    pair: Quantized, marker: Marker, around: Surroundings, compute: ComputeByTorch, group: int
) -> TensorEntry:
    """Lay out a matrix with scales of groups of a row, in tiles."""
    shape = pair.unpacked_shape if group == _NV_GROUP else pair.values.shape
    size, grid = setting(marker, "group_size", group), pair.scales.shape
    if len(shape) != 2 or shape[1] % group or size != group:
        raise pair.unfit(f"its groups of {size} columns do not fit it")
    tiles = (-(-shape[0] // _ROW_TILE), -(-(shape[1] // group) // _COLUMN_TILE))
    if pair.scales.dtype.itemsize != 1 or grid != (tiles[0] * _ROW_TILE, tiles[1] * _COLUMN_TILE):
        raise pair.unfit()
    return pair.numbers(compute, around.dtype, shape, (1, group))


def _compute_mxfp8(gather: Gather, at: Computed, box: Box, dtype: Any) -> Any:
    """Multiply floats by powers of two, in 32 bits: an exponent of 0 is zero, of 255 infinity."""
    import torch

    bits = _untile_scales(gather, at, box).to(torch.int32) << 23
    return (read_floats(gather, at.values, box) * bits.view(torch.float32)).to(dtype)


def _compute_nvfp4(gather: Gather, at: Computed, box: Box, dtype: Any) -> Any:
    """Multiply floats of four bits by the product of two scales, all in the requested type."""
    import torch

    kind = computed_type(dtype)
    table = torch.tensor(FP4, dtype=kind)
    codes = read_codes(gather, at.values, box, upper_first=True)
    numbers = torch.cat((table, -table))[codes]
    global_scale = read_floats(gather, at.extras[0]).reshape(())
    scales = global_scale.to(kind) * _untile_scales(gather, at, box).to(torch.float32).to(kind)
    return (numbers * scales).to(dtype)


def _untile_scales(gather: Gather, at: Computed, box: Box) -> Any:
    """Return the scale of each element of a box, as stored, out of tiles."""
    import torch

    lo = box.lo[0] // _ROW_TILE * _ROW_TILE
    hi = -(-box.hi[0] // _ROW_TILE) * _ROW_TILE
    width = at.scales.shape[1]
    stored = view_typed(gather(at.scales, Box((lo, 0), (hi, width))), at.scales.dtype)
    parts = _ROW_TILE // _TILE_PART
    shape = (-1, width // _COLUMN_TILE, _TILE_PART, parts, _COLUMN_TILE)
    rows = stored.view(torch.uint8).reshape(shape).permute(0, 3, 2, 1, 4).reshape(-1, width)
    columns = torch.arange(box.lo[1], box.hi[1]) // at.block[1]
    scales = rows[box.lo[0] - lo : box.hi[0] - lo].index_select(1, columns)
    return scales.view(stored.dtype)
