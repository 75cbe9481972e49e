"""Amounts as people write them: sizes, shares and dims."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptool.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: str, option: str) -> int:
    """Bytes of ``5GB``, ``512MiB`` or ``1000``; UsageError where it is no positive size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise UsageError(
            f"invalid {option} {text!r}: not a size", hint="such as 512MiB, 5GB or 1000000"
        )
    return size


def parse_share(text: str, option: str) -> float:
    """0.05 of ``5%`` or ``0.05``; UsageError where it is no share between 0 and 1."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise UsageError(f"invalid {option} {text!r}: not a fraction", hint="such as 5% or 0.05")
    return share


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Sizes of named dims; UsageError where one is not NAME=SIZE."""
    sizes: dict[str, int] = {}
    for text in texts:
        dim, equals, size = map(str.strip, text.partition("="))
        if not equals or not size.isdecimal():
            raise UsageError(
                f"invalid --dim {text!r}: expected NAME=SIZE", hint="such as --dim head=32"
            )
        if sizes.setdefault(dim, int(size)) != int(size):
            raise UsageError(f"--dim {dim}: conflicting sizes {sizes[dim]} and {size}")
    return sizes
