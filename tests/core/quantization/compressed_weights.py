"""Weights as compressed-tensors 0.20 and ModelOpt 0.47 pack them, and the numbers they unpack.

``python tests/core/quantization/compressed_weights.py`` records them if both are installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RECORDED = Path(__file__).with_name("compressed_tensors_0_20_0.safetensors")
INTEGERS: dict[str, tuple[tuple[int, ...], int, int | None, bool, torch.dtype]] = {
    "group": ((6, 24), 4, 8, True, torch.bfloat16),
    "group_zeros": ((10, 32), 4, 16, False, torch.bfloat16),
    "rows": ((5, 13), 4, None, True, torch.float16),
    "rows_zeros": ((9, 16), 4, None, False, torch.float32),
    "bytes": ((4, 16), 8, 8, True, torch.bfloat16),
    "bytes_zeros": ((7, 12), 8, 4, False, torch.bfloat16),
    "experts": ((3, 4, 16), 4, 8, True, torch.bfloat16),
}
"""Shape, bits, numbers a scale (None: a row), whether without zero points, and type of scales."""
FLOATS = {"nvfp4": (4, 48), "nvfp4_wide": (3, 96)}


def recorded() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what is stored, and the weights by their names."""
    tensors = load_file(RECORDED)
    parts: list[dict[str, torch.Tensor]] = [
        {n.removeprefix(head): t for n, t in tensors.items() if n.startswith(head)}
        for head in ("stored.", "truth.")
    ]
    return parts[0], parts[1]


def record() -> None:
    """Pack random weights, and unpack them."""
    tensors: dict[str, torch.Tensor] = {}
    torch.manual_seed(7)
    for name, case in INTEGERS.items():
        tensors |= _named(name, *_pack_integers(*case))
    for name, shape in FLOATS.items():
        tensors |= _named(name, *_pack_floats(shape))
    tensors |= _named("modelopt", *_pack_by_modelopt((4, 64)))
    save_file(tensors, RECORDED)


def _named(name: str, stored: dict[str, torch.Tensor], truth: torch.Tensor) -> dict[str, Any]:
    named = {f"stored.layer.{name}.{part}": t.contiguous() for part, t in stored.items()}
    return named | {f"truth.layer.{name}.weight": truth.contiguous()}


def _pack_integers(
    shape: tuple[int, ...], bits: int, group: int | None, symmetric: bool, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor

    columns = 1 if group is None else shape[-1] // group
    args = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    args |= {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    state = {
        "weight": torch.randn(shape, dtype=dtype),
        "weight_scale": (torch.rand(*shape[:-1], columns) / 4 + 0.01).to(dtype),
    }
    if not symmetric:
        half = 1 << (bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, (*shape[:-1], columns)).to(
            torch.int8
        )
    return _both(Compressor, state, args)


def _pack_floats(shape: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from compressed_tensors.compressors import NVFP4PackedCompressor as Compressor

    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    state = {
        "weight": torch.randn(shape, dtype=torch.bfloat16),
        "weight_scale": (torch.rand(shape[0], shape[1] // 16) * 400 + 1).bfloat16(),
        "weight_global_scale": torch.tensor([1234.5]),
    }
    return _both(Compressor, state, args)


def _pack_by_modelopt(shape: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    packed, scale, of_all = NVFP4QTensor.quantize(torch.randn(shape, dtype=torch.bfloat16), 16)
    scales = {"scale": scale, "double_scale": of_all, "block_sizes": {-1: 16}}
    stored = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": of_all}
    return stored, packed.dequantize(torch.bfloat16, **scales)


def _both(
    compressor: Any, state: dict[str, torch.Tensor], args: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    stored = compressor.compress(dict(state), scheme)
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


if __name__ == "__main__":
    record()
