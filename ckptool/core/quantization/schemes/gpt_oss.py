"""MXFP4 as gpt-oss stores its experts: ``X_blocks`` and ``X_scales``, in bytes.

The formula is that of ``torch.distributed.checkpoint.quantized_hf_storage`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Computed, Gather, TensorEntry
from ckptool.core.quantization.blocks import FP4, blocks_of
from ckptool.core.quantization.model import Quantized, Scheme, Surroundings, part_of_row
from ckptool.core.quantization.schemes.scaled import MXFP4, is_mx
from ckptool.core.views import permute

_BLOCKS, _SCALES = "_blocks", "_scales"


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield blocks of floats of four bits with scales that are exponents."""
    for name in names:
        weight, scales = name.removesuffix(_SCALES), catalog.tensors[name]
        values = catalog.tensors.get(weight + _BLOCKS)
        if values is not None and values.dtype.name == "uint8" and is_mx(scales):
            yield Quantized(MXFP4, weight, values, scales, _lay_out)


def _lay_out(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out experts as transformers (5.23, mxfp4.py) has them: inputs first.

    Rows of outputs are stored; models and files without quantization have them as columns.
    """
    shape, grid = pair.values.shape, pair.scales.shape
    if not grid or shape[:-1] != grid or not shape[-1]:
        raise pair.unfit()
    size = 2 * shape[-1]
    whole = (*grid[:-1], grid[-1] * size)
    rows = pair.numbers(_compute, around.dtype, whole, part_of_row(grid, size))
    return permute(rows, (0, 2, 1)) if len(whole) == 3 else rows


def _compute(gather: Gather, at: Computed, box: Box, dtype: Any) -> Any:
    """Multiply two numbers per byte, the lower half first, by 2 ** (scale - 127), as requested."""
    import torch

    grid, size = blocks_of(box, at.block), at.block[-1]
    pairs = torch.from_numpy(gather(at.values, Box((*grid.lo, 0), (*grid.hi, size // 2))))
    # twice the values, since 2 ** 128 exceeds 32-bit floats, and half of it does not
    table = torch.tensor([2 * number for number in (*FP4, *(-n for n in FP4))], dtype=dtype)
    codes = torch.arange(256)
    by_byte = torch.stack((table[codes & 0x0F], table[codes >> 4]), -1)
    words = by_byte.view({2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize])
    numbers = words.flatten().index_select(0, pairs.flatten().to(torch.int32)).view(dtype)
    numbers = numbers.reshape(*grid.shape, size)
    exponents = torch.from_numpy(gather(at.scales, grid)).to(torch.int32) - 128
    factors = torch.pow(2.0, exponents).unsqueeze(-1)
    # float16 lacks some of these powers of two: the product is rounded, not the factor
    numbers *= factors if dtype == torch.float16 else factors.to(dtype)
    rows = numbers.reshape(*grid.shape[:-1], grid.shape[-1] * size)
    start = box.lo[-1] - grid.lo[-1] * size
    return rows[..., start : start + box.shape[-1]]


SCHEME = Scheme(find, (_SCALES,), (MXFP4,))
