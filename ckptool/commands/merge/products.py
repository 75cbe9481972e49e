"""The product of a LoRA's matrices as the shape of the weight that it is added to."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ckptool.commands.merge.adapter import Settings
from ckptool.commands.merge.expressions import computed
from ckptool.commands.merge.targets import Target
from ckptool.core.casts import can_cast
from ckptool.core.catalog import TensorEntry
from ckptool.core.views import merge_dims, permute, split_dim
from ckptool.engine.formulas.low_rank import (
    LowRank,
    Magnitudes,
    low_rank_reads,
    magnitude_reads,
)
from ckptool.errors import Unsupported

_TURNED = (1, 0)
_WIDE = 4
"""Times as many columns as its rank a weight has, so that rows of B take little beside its own."""


class Product(Struct, frozen=True):
    """A weight with a LoRA added to it, by how much, and whether its rows are then scaled."""

    entry: TensorEntry
    scale: float
    is_scaled: bool


class _Factors(Struct, frozen=True):
    """A weight as a matrix, or one for each expert, B and A alike, and how to view it as it was."""

    weight: TensorEntry
    left: TensorEntry
    right: TensorEntry
    restore: Callable[[TensorEntry], TensorEntry] = lambda entry: entry


def product_of(target: Target, weight: TensorEntry, settings: Settings) -> Product:
    """Add a LoRA to its weight; Unsupported if one is no float, or DoRA's vector is missing."""
    scale, magnitudes = settings.scale_of(target.key), target.lora.magnitudes
    for entry in filter(None, (weight, *target.lora.both, target.lora.bias, magnitudes)):
        if not can_cast(entry):
            raise Unsupported(f"{entry.name}: {entry.dtype}, which is no type of a LoRA's numbers")
    if settings.use_dora != (magnitudes is not None):
        says = "says use_dora, but there is no" if settings.use_dora else "lacks use_dora, but has"
        raise Unsupported(f"{settings.place} {says} lora_magnitude_vector of {target.lora.module}")
    factors = _factors(target, weight)
    parts = [factors.weight, factors.left, factors.right]
    is_wide = factors.weight.shape[-1] >= _WIDE * factors.left.shape[-1]
    how = {"exceeds": True, "in_pieces": is_wide}
    if magnitudes is None:
        entry = computed(factors.weight, parts, LowRank(scale), low_rank_reads, **how)
    else:
        flat = merge_dims(magnitudes, 0, len(magnitudes.shape))
        if len(factors.weight.shape) != 2 or flat.shape != factors.weight.shape[:1]:
            raise Unsupported(
                f"{magnitudes.name}: {list(magnitudes.shape)} for {target.name}"
                f" {list(weight.shape)}"
            )
        formula = Magnitudes(LowRank(scale))
        parts.append(flat)
        entry = computed(factors.weight, parts, formula, magnitude_reads, **how)
    return Product(factors.restore(entry), scale, magnitudes is not None)


def _factors(target: Target, weight: TensorEntry) -> _Factors:
    """View a weight as matrices with outputs as rows, or B and A so that they fit it as it is."""
    left, right = target.lora.both
    if target.experts:
        return _of_experts(target, weight)
    if len(weight.shape) > 2:  # a convolution: its kernel's elements are columns
        return _of_convolution(weight, left, right)
    if not target.is_turned:
        return _Factors(weight, left, right)
    if target.lora.magnitudes is None:
        return _Factors(weight, permute(right, _TURNED), permute(left, _TURNED))
    turned = permute(weight, _TURNED)  # the rows that are scaled are those of the outputs
    return _Factors(turned, left, right, lambda entry: permute(entry, _TURNED))


def _of_experts(target: Target, weight: TensorEntry) -> _Factors:
    """View matrices of all experts, A's rows by expert, B's columns by rank, as PEFT has them."""
    left, right = target.lora.both
    rank = right.shape[0] // target.experts
    of_right = split_dim(right, 0, (target.experts, rank))
    of_left = permute(split_dim(left, 1, (rank, target.experts)), (2, 0, 1))
    if not target.is_turned:
        return _Factors(weight, of_left, of_right)
    return _Factors(weight, permute(of_right, (0, 2, 1)), permute(of_left, (0, 2, 1)))


def _of_convolution(weight: TensorEntry, left: TensorEntry, right: TensorEntry) -> _Factors:
    """View the kernels of a convolution as columns."""
    inner = len(weight.shape) - 1
    flat, left, right = (merge_dims(entry, 1, inner) for entry in (weight, left, right))
    return _Factors(flat, left, right, lambda entry: split_dim(entry, 1, weight.shape[1:]))
