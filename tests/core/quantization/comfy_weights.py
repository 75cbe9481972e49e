"""Weights as comfy-kitchen (0.2.40) quantizes them, with markers as ComfyUI writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

Named = tuple[str, dict[str, torch.Tensor], torch.Tensor]
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def by_comfy_kitchen() -> Iterator[Named]:
    """Every format that its layouts have, and their numbers in three types."""
    from comfy_kitchen import tensor as ck

    fp8, int8, int4 = (
        ck.TensorCoreFP8Layout,
        ck.TensorWiseINT8Layout,
        ck.TensorCoreConvRotW4A4Layout,
    )
    turned: dict[str, Any] = {"convrot": True, "convrot_groupsize": 16}
    rows = {"per_channel": True}
    cases: dict[str, tuple[Any, tuple[int, int], dict[str, Any], dict[str, Any]]] = {
        "fp8": (fp8, (6, 40), {}, {"format": "float8_e4m3fn"}),
        "nvfp4": (ck.TensorCoreNVFP4Layout, (144, 48), {}, {"format": "nvfp4"}),
        "mxfp8": (ck.TensorCoreMXFP8Layout, (160, 96), {}, {"format": "mxfp8"}),
        "int8": (int8, (6, 40), {}, {"format": "int8_tensorwise"}),
        "int8_rows": (int8, (6, 40), rows, {"format": "int8_tensorwise"}),
        "int8_turned": (int8, (12, 48), turned | rows, {"format": "int8_tensorwise", **turned}),
        "int4_turned": (int4, (24, 512), {}, {"format": "convrot_w4a4"}),
    }
    for name, (layout, shape, how, marker) in cases.items():
        for dtype in TYPES:
            values, params = layout.quantize(torch.randn(shape, dtype=dtype), **how)
            parts = layout.state_dict_tensors(values, params)
            text = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
            stored = {f"weight{end}": part for end, part in parts.items()} | {"comfy_quant": text}
            yield f"{name}.{str(dtype)[6:]}", stored, layout.dequantize(values, params)
