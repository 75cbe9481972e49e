"""Reads common to all quantization schemes: values as floats, and the scales of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptool.core.box import Box
from ckptool.core.catalog import ScaledBlocks, TensorEntry
from ckptool.core.dtype import DType

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Gather = Callable[[TensorEntry, Box], Array]
"""Reads a box of a tensor as stored."""


def read_floats(gather: Gather, entry: TensorEntry, box: Box) -> Any:
    """Read a box of a tensor as floats of 32 bits."""
    import torch

    return view_typed(gather(entry, box), entry.dtype).to(torch.float32)


def blocks_of(box: Box, block: tuple[int, ...]) -> Box:
    """Return the blocks that a box touches, in counts of blocks."""
    return Box(
        tuple(lo // size for lo, size in zip(box.lo, block, strict=True)),
        tuple(-(-hi // size) for hi, size in zip(box.hi, block, strict=True)),
    )


def spread(of_blocks: Any, at: ScaledBlocks, box: Box) -> Any:
    """Return for each element of a box the value of its block."""
    import torch

    grid = blocks_of(box, at.block)
    for dim, size in enumerate(at.block):
        which = torch.arange(box.lo[dim], box.hi[dim]) // size - grid.lo[dim]
        of_blocks = of_blocks.index_select(dim, which)
    return of_blocks


def spread_scales(gather: Gather, at: ScaledBlocks, box: Box) -> Any:
    """Return the scale of each element, in 32 bits."""
    return spread(read_floats(gather, at.scales, blocks_of(box, at.block)), at, box)


def view_typed(bits: Array, dtype: DType) -> Any:
    """View stored elements as a torch tensor of their type."""
    import numpy as np
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1).view("u1"))
    return flat.view(getattr(torch, dtype.name)).reshape(bits.shape)
