"""The memory of torch tensors: whether it can be filled, and its bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckptool.engine.gather import Array, unit
from ckptool.errors import CannotDo

if TYPE_CHECKING:
    import torch


def why_not_filled(tensor: torch.Tensor) -> str | None:
    """Why bits cannot be written into a tensor; None where they can."""
    import torch

    if type(tensor.detach()) is not torch.Tensor:
        kind = type(tensor).__name__
        return f"a {kind}, a subclass with memory of its own: load plain tensors, then make these"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.is_meta:
        return "on the meta device: it has no memory yet (to_empty gives it some)"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugate or negative view"
    if _overlaps(tensor.shape, tensor.stride()):
        return "an expanded view or its like: several of its elements share their memory"
    return None


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether steps along one dim may land within what the dims of smaller steps span."""
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < span:
            return 0 not in shape
        span += (size - 1) * stride
    return False


def bits_of(tensor: torch.Tensor) -> Array:
    """The elements of a CPU tensor as bits, strides and all, without a copy."""
    import torch

    itemsize = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(s * itemsize for s in tensor.stride())
    if not tensor.numel():
        return np.empty(shape, unit(itemsize))
    data = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(data).numpy()
    offset = tensor.storage_offset() * itemsize
    return np.ndarray(shape, unit(itemsize), whole, offset, strides)


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of a name; CannotDo where this torch has none."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CannotDo(f"torch {torch.__version__} has no element type {name}")
    return found
