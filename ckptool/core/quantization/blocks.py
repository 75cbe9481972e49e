"""Arithmetic common to several schemes: values as floats, scales of blocks, packed integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptool.core.box import Box
from ckptool.core.catalog import Compute, Computed, Gather, TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.errors import Unsupported

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a four-bit float (E2M1) without its sign."""
_WORD = 32
ComputeByTorch = Callable[[Gather, Computed, Box, Any], Any]
"""Computes a box of a whole tensor into a tensor of a type of torch, rounded to it once."""


def by_torch(compute: ComputeByTorch) -> Compute:
    """Return ``compute`` as a function of a type of this package, into an array of its bits."""

    def compute_bits(gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        try:
            import torch
        except ImportError:
            raise Unsupported(
                "--dequantize needs torch", hint="pip install 'ckptool[torch]'"
            ) from None
        numbers = compute(gather, at, box, getattr(torch, dtype.name)).contiguous()
        flat: Array = numbers.reshape(-1).view(torch.uint8).numpy()
        return flat.view(f"u{dtype.itemsize}")

    return compute_bits


def view_typed(bits: Array, dtype: DType) -> Any:
    """View stored elements as a torch tensor of a type of their size, or of bytes."""
    import numpy as np
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1).view("u1"))
    return flat.view(getattr(torch, dtype.name)).reshape(bits.shape)


def read_floats(gather: Gather, entry: TensorEntry, box: Box | None = None) -> Any:
    """Read a box of a tensor, or all of it, as floats of 32 bits."""
    import torch

    stored = gather(entry, Box.whole(entry.shape) if box is None else box)
    return view_typed(stored, entry.dtype).to(torch.float32)


def blocks_of(box: Box, block: tuple[int, ...]) -> Box:
    """Return the blocks that a box touches, in counts of blocks."""
    return Box(
        tuple(lo // size for lo, size in zip(box.lo, block, strict=True)),
        tuple(-(-hi // size) for hi, size in zip(box.hi, block, strict=True)),
    )


def spread(values: Any, block: tuple[int, ...], box: Box) -> Any:
    """Return for each element of a box the value of its block."""
    import torch

    grid = blocks_of(box, block)
    for dim, size in enumerate(block):
        index = torch.arange(box.lo[dim], box.hi[dim]) // size - grid.lo[dim]
        values = values.index_select(dim, index)
    return values


def read_spread(gather: Gather, entry: TensorEntry, block: tuple[int, ...], box: Box) -> Any:
    """Read what a tensor has for the block of each element of a box, as floats of 32 bits."""
    return spread(read_floats(gather, entry, blocks_of(box, block)), block, box)


def read_codes(gather: Gather, entry: TensorEntry, box: Box, *, upper_first: bool = False) -> Any:
    """Read a box of codes of four bits, two per byte of a row, as indices for torch."""
    lo, hi = box.lo[-1] // 2, -(-box.hi[-1] // 2)
    pairs = gather(entry, Box((*box.lo[:-1], lo), (*box.hi[:-1], hi)))
    return split_bytes(view_typed(pairs, BY_NAME["uint8"]), box, upper_first=upper_first)


def split_bytes(pairs: Any, box: Box, *, upper_first: bool) -> Any:
    """Return the codes of four bits of a box, the first ones in bytes of torch."""
    import torch

    halves = (pairs >> 4, pairs & 0x0F) if upper_first else (pairs & 0x0F, pairs >> 4)
    first = box.lo[-1] % 2
    return torch.stack(halves, -1).flatten(-2)[..., first : first + box.shape[-1]].to(torch.long)


def unpack(
    gather: Gather,
    words: TensorEntry,
    box: Box,
    dim: int,
    bits: int,
    order: tuple[int, ...] | None = None,
) -> Any:
    """Return a box of the integers packed along a dim into 32-bit words, as 32-bit integers.

    The lowest bits are the first, or those of the places in ``order``. If their width does not
    divide a word, they continue in the next word.
    """
    import numpy as np
    import torch

    lo, hi = list(box.lo), list(box.hi)
    begin, end = box.lo[dim] * bits, box.hi[dim] * bits
    lo[dim], hi[dim] = begin // _WORD, -(-end // _WORD)
    stored = np.ascontiguousarray(gather(words, Box(tuple(lo), tuple(hi)))).view("<u4")
    wide = torch.from_numpy(stored.astype(np.int64)).movedim(dim, -1)
    mask = (1 << bits) - 1
    if _WORD % bits == 0:
        shifts = torch.tensor(order or range(_WORD // bits)) * bits
        integers = ((wide.unsqueeze(-1) >> shifts) & mask).flatten(-2)
        first = (begin - lo[dim] * _WORD) // bits
        integers = integers[..., first : first + box.shape[dim]]
    else:
        at = torch.arange(begin, end, bits) - lo[dim] * _WORD
        low, shift = at // _WORD, at % _WORD
        following = wide.roll(-1, -1).index_select(-1, low)
        integers = ((wide.index_select(-1, low) | (following << _WORD)) >> shift) & mask
    return integers.to(torch.int32).movedim(-1, dim)


def read_order(gather: Gather, order: TensorEntry, start: int, stop: int) -> Any:
    """Read the numbers of the groups that columns are in, as indices for torch."""
    import numpy as np
    import torch

    stored = np.ascontiguousarray(gather(order, Box((start,), (stop,))))
    return torch.from_numpy(stored.view(f"<i{order.dtype.itemsize}").astype(np.int64))
