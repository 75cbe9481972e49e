"""What a marker of ComfyUI says of a weight (ComfyUI, comfy-kitchen 0.2.40)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptool.core.quantization.model import Quantized

_COMMON = frozenset("format full_precision_matrix_mult orig_dtype params".split())
Marker = Mapping[str, Any]


def require_known(pair: Quantized, marker: Marker, *more: str) -> None:
    """Raise Unsupported if a marker has settings of an unknown meaning."""
    params = marker.get("params")
    settings = {**(params if isinstance(params, dict) else {}), **marker}
    unknown = sorted(set(map(str, settings)) - _COMMON - set(more))
    if unknown:
        raise pair.unfit(f"its marker says {unknown[0]}, which is unknown")


def setting(marker: Marker, name: str, default: Any) -> Any:
    """Return a setting of a marker, or of ``params`` in it."""
    params = marker.get("params")
    return marker.get(name, params.get(name, default) if isinstance(params, dict) else default)


def computed_type(dtype: Any) -> Any:
    """Return the type in which comfy-kitchen computes: the requested one if it is common."""
    import torch

    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
