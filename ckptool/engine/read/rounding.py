"""Cast numbers to another floating type, bit for bit as torch's ``.to()``, without torch.

Where torch itself makes different NaNs depending on their place in a tensor (its vector code and
the code for the rest of a row differ), NaNs are those of the vector code (torch 2.13 on x86).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ckptool.core.casts import beyond, needs_torch
from ckptool.core.dtype import BEYOND_SATURATION, BY_NAME, SATURATES, DType
from ckptool.engine.read.numbers import Array, decode, is_finite
from ckptool.errors import Unsupported

_PIECE = 1 << 18
"""Elements that are computed at a time. Of fewer, threads wait longer for Python's lock, which each
takes after every call of numpy, than they compute; of more, arrays leave the processor's cache.
"""
_NAN, _NAN_OF_HALF = 0xFFFF, 0x7FC0
"""Torch's bfloat16 NaN, the second one for NaNs from float16."""
_QUIET, _QUIET_HALF = np.uint32(0x0040_0000), np.uint32(0x7E00)
_INFINITY, _SIZE = np.uint32(0x7F80_0000), np.uint32(0x7FFF_FFFF)
_LEAST_HALF, _BEYOND_HALF = np.uint32(113 << 23), np.uint32(143 << 23)
"""The smallest normal half, and the smallest number whose exponent exceeds those of halves."""


def cast(values: Array, stored: DType, target: DType) -> Array:
    """Return the numbers in another element type, rounded to nearest even as torch does.

    ``values`` are stored bits of any shape, and so is the result. Raises Unsupported if only torch
    can, and torch is missing.
    """
    if stored == target:
        return values
    flat = np.ascontiguousarray(values).reshape(-1)
    result: Array = np.empty(flat.size, f"u{target.itemsize}")
    for piece in pieces(flat.size):
        result[piece] = cast_few(flat[piece], stored, target)
    return result.reshape(values.shape)


def pieces(count: int) -> Iterator[slice]:
    """Yield the pieces in which so many elements are computed."""
    return (slice(start, start + _PIECE) for start in range(0, count, _PIECE))


def cast_few(flat: Array, stored: DType, target: DType) -> Array:
    """Cast as ``cast`` does, but no more numbers than are computed at a time.

    The bits may be the lower ones of larger words, without a copy: to assign them cuts these.
    """
    if stored == target:
        return flat
    if needs_torch(stored, target):
        return _cast_by_torch(flat, stored, target)
    with np.errstate(all="ignore"):
        if stored.itemsize == 2 and "float16" in (stored.name, target.name):
            every = _every_cast(stored.name, target.name)
            return every.take(flat.astype(np.intp))  # faster than by 16 bits
        return _round(flat, stored.name, target.name)


def may_have_lost(values: Array, dtype: DType) -> bool:
    """Return whether some values are what numbers beyond the range of their type become."""
    flat, limit = values.reshape(-1), _least_limit(dtype)
    if limit is None or not flat.size:
        return bool(_is_limit(flat, dtype).any())
    lowest = limit | 1 << (8 * dtype.itemsize - 1)
    signed = flat.view(f"i{dtype.itemsize}")
    return bool(flat.max() >= lowest or signed.max() >= limit)  # negative codes are the largest


def count_lost(values: Array, stored: DType, result: Array, target: DType) -> tuple[int, str]:
    """Return how many values, as stored and as cast, were beyond the type's range, and the outcome.

    A number that is stored as non-finite does not count, unless it becomes finite.
    """
    if not may_have_lost(result, target):
        return 0, ""
    limits = _is_limit(result.reshape(-1), target)
    before, after = values.reshape(-1)[limits], result.reshape(-1)[limits]
    is_lost = is_finite(before, stored)
    if target.name == SATURATES:
        is_lost = _is_beyond(before, stored) & (is_lost | is_finite(after, target))
    if not is_lost.any():
        return 0, ""
    is_capped = target.name == SATURATES and bool(is_finite(after[is_lost], target).any())
    return int(np.count_nonzero(is_lost)), "its largest" if is_capped else beyond(target.name)


def _is_limit(bits: Array, dtype: DType) -> Array:
    """Return where values are not finite, or the largest number if all beyond become that."""
    limit = _least_limit(dtype)
    if limit is None:
        return ~is_finite(bits, dtype)
    return np.asarray((bits & bits.dtype.type((1 << (8 * dtype.itemsize - 1)) - 1)) >= limit)


def _least_limit(dtype: DType) -> int | None:
    """Return the least positive code that is a limit; None if it is one code, whatever its sign."""
    special = dtype.first_special
    return special - (dtype.name == SATURATES) if special else None


def _is_beyond(bits: Array, dtype: DType) -> Array:
    """Return where numbers, including infinite ones, are larger than any that is rounded to 448."""
    single = BY_NAME["float32"]
    numbers = cast(bits, dtype, single).view(np.float32)
    return np.asarray(np.abs(numbers) > BEYOND_SATURATION)


@lru_cache
def _every_cast(stored: str, target: str) -> Array:
    """Return what each of the 65,536 floats of 16 bits becomes."""
    return _round(np.arange(1 << 16, dtype=np.uint16), stored, target)


def _round(bits: Array, stored: str, target: str) -> Array:
    """Return the bits in the other, different type; every cast goes through float32."""
    if stored == "float64":
        single = bits.view(np.float64).astype(np.float32).view(np.uint32)
    elif stored == "bfloat16":
        single = decode(bits, BY_NAME[stored]).view(np.uint32)
    elif stored == "float16":
        single = bits.view(np.float16).astype(np.float32).view(np.uint32)
        single[_is_nan(single)] |= _QUIET
    else:
        single = bits.view(np.uint32)
    if target == "float64":
        return single.view(np.float32).astype(np.float64).view(np.uint64)
    if target == "bfloat16":
        return _to_bfloat16(single, _NAN_OF_HALF if stored == "float16" else _NAN)
    return _to_half(single) if target == "float16" else single


def _to_bfloat16(single: Array, quiet: int) -> Array:
    """Round floats of 32 bits; the halves are in the lower bits of as many words."""
    # half of the last place is added, less one bit if that place is even: so ties go to even
    rounded = single >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += single
    rounded >>= np.uint32(16)
    if np.isnan(single.view(np.float32).max()):  # the largest is one if any is
        rounded[_is_nan(single)] = quiet
    return rounded


def _to_half(single: Array) -> Array:
    """Round floats of 32 bits to halves; NaNs become quiet and keep their payload's upper bits.

    Normal numbers are rounded as integers, as numpy's own way is slow.
    """
    size = single & _SIZE
    # as for bfloat16; a half's exponent is 112 less
    rounded = size >> np.uint32(13)
    rounded &= np.uint32(1)
    rounded += size
    rounded -= np.uint32((112 << 23) - 0x0FFF)
    rounded >>= np.uint32(13)
    halves = rounded.astype(np.uint16)
    odd = np.flatnonzero(size - _LEAST_HALF >= _BEYOND_HALF - _LEAST_HALF)
    halves[odd] = _to_odd_half(size[odd])
    halves |= (single >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
    return halves


def _to_odd_half(size: Array) -> Array:
    """Round positive floats of 32 bits that are no normal halves."""
    halves = size.view(np.float32).astype(np.float16).view(np.uint16)
    nan = size > _INFINITY
    halves[nan] = _QUIET_HALF | (size[nan] & (_QUIET - 1)) >> 13
    return halves


def _is_nan(single: Array) -> Array:
    return (single & _SIZE) > _INFINITY


def _cast_by_torch(flat: Array, stored: DType, target: DType) -> Array:
    try:
        import torch
    except ImportError:
        raise Unsupported(
            f"a cast of {stored} to {target} needs torch", hint="pip install 'ckptool[torch]'"
        ) from None
    bits = torch.from_numpy(flat.view("u1"))
    typed = bits.view(getattr(torch, stored.name)).to(getattr(torch, target.name))
    result: Array = typed.view(torch.uint8).numpy().view(f"u{target.itemsize}")
    return result
