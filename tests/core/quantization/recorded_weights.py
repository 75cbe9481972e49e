"""Weights as their own libraries quantize them, and the numbers that these compute from them.

``python tests/core/quantization/recorded_weights.py NAME`` records one of ``WRITERS`` again, if
that library is installed: bitsandbytes 0.50.2, AutoGPTQ 0.7.1 and AutoAWQ 0.2.9 (of these two the
modules that are imported here, in otherwise empty packages), compressed-tensors 0.12.2, which still
supports an order of groups, and 0.20.0, comfy-kitchen 0.2.40, ModelOpt 0.47.0, transformers 5.23.0,
torchao 0.18.0 and 0.13.0.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from comfy_weights import by_comfy_kitchen
from mixed_models import mixed_by_compressed_tensors, mixed_by_modelopt
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
Named = tuple[str, dict[str, torch.Tensor], torch.Tensor]


def recorded(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what is stored, and the weights by their names."""
    tensors = load_file(HERE / f"{name}.safetensors")
    parts: list[dict[str, torch.Tensor]] = [
        {n.removeprefix(head): t for n, t in tensors.items() if n.startswith(head)}
        for head in ("stored.", "truth.")
    ]
    return parts[0], parts[1]


def _bitsandbytes() -> Iterator[Named]:
    """Four bits in the type that the state says, eight bits in bf16."""
    import bitsandbytes.functional as bnb

    cases: dict[str, Any] = {
        "nf4": ((6, 64), "nf4", torch.bfloat16, False, 64, torch.uint8),
        "nf4_nested": ((40, 513), "nf4", torch.bfloat16, True, 64, torch.uint8),
        "nf4_half": ((48, 40), "nf4", torch.float16, True, 128, torch.uint8),
        "nf4_wide": ((8, 64), "nf4", torch.float32, False, 64, torch.uint8),
        "nf4_in_bf16": ((16, 64), "nf4", torch.bfloat16, True, 64, torch.bfloat16),
        "nf4_odd": ((7, 21), "nf4", torch.float32, False, 64, torch.uint8),
        "fp4": ((6, 64), "fp4", torch.float16, False, 64, torch.uint8),
        "fp4_nested": ((24, 96), "fp4", torch.bfloat16, True, 32, torch.uint8),
    }
    for name, (shape, kind, dtype, nested, size, storage) in cases.items():
        weight = torch.randn(shape, dtype=dtype)
        packed, state = bnb.quantize_4bit(
            weight, None, None, size, nested, kind, quant_storage=storage
        )
        parts = {f"weight.{part}": t for part, t in state.as_dict(packed=True).items()}
        yield name, {"weight": packed, **parts}, bnb.dequantize_4bit(packed, state)
    # The kernel for CPUs (0.50.2, AVX-512) takes a wrong scale where a row ends within a block.
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    packed, state = bnb.quantize_4bit(torch.randn(6, 96, dtype=torch.bfloat16), quant_type="nf4")
    parts = {f"weight.{part}": t for part, t in state.as_dict(packed=True).items()}
    arguments = (state.absmax, state.code, 64, (6, 96), torch.bfloat16)
    truth = _dequantize_4bit_compute(packed.flatten(), *arguments)
    yield "nf4_across_rows", {"weight": packed, **parts}, truth
    weight, scales, _ = bnb.int8_vectorwise_quant(torch.randn(9, 40, dtype=torch.float16))
    form = torch.tensor(0, dtype=torch.uint8)
    numbers = bnb.int8_vectorwise_dequant(weight, scales)
    for dtype in (torch.bfloat16, torch.float32):
        stored = {"weight": weight.clone(), "SCB": scales.clone(), "weight_format": form.clone()}
        yield f"int8_{dtype}".replace("torch.", ""), stored, numbers.to(dtype)


def _autogptq() -> Iterator[Named]:
    """What an identity times the layer gives: every number of the weight, once."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    for bits in (2, 3, 4, 8):
        for group, ordered, symmetric in ((16, False, True), (16, True, False), (-1, False, False)):
            columns, rows = 64, 32
            layer = QuantLinear(bits, group, columns, rows, bias=False)
            groups = 1 if group == -1 else columns // group
            top = (1 << bits) - 1
            zeros = torch.randint(1, top + 1, (rows, groups)).float()
            if symmetric:
                zeros = torch.full((rows, groups), float(1 << (bits - 1)))
            order = torch.arange(columns, dtype=torch.int32) // (columns // groups)
            order = order[torch.randperm(columns)] if ordered else order
            linear = torch.nn.Linear(columns, rows, bias=False)
            scales = (torch.rand(rows, groups) / 8 + 0.01).half().float()
            levels = torch.randint(0, top + 1, (rows, columns)).float()
            linear.weight.data = (levels - zeros[:, order.long()]) * scales[:, order.long()]
            layer.pack(linear, scales, zeros.clone(), g_idx=order)
            layer.scales = layer.scales.half()
            truth = layer(torch.eye(columns, dtype=torch.float16)).T
            parts = ("qweight", "qzeros", "scales", "g_idx")
            stored = {part: getattr(layer, part) for part in parts}
            name = f"{bits}_{group}_{'ordered' if ordered else 'plain'}".replace("-1", "whole")
            yield f"v1.{name}", stored, truth
            if ordered:  # GPTQModel's second format stores zero points as they are
                layer.pack(linear, scales, zeros + 1, g_idx=order)
                yield f"v2.{name}", stored | {"qzeros": layer.qzeros}, truth


def _autoawq() -> Iterator[Named]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    for name, group, columns, rows in (("group", 32, 96, 64), ("whole", 64, 64, 32)):
        linear = torch.nn.Linear(columns, rows, bias=False)
        scales = (torch.rand(columns // group, rows) / 8 + 0.01).half()
        zeros = torch.randint(0, 16, (columns // group, rows))
        levels = torch.randint(0, 16, (rows, columns))
        spread = torch.arange(columns) // group
        linear.weight.data = ((levels - zeros[spread].T) * scales[spread].T).half()
        layer = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales, zeros=zeros)
        stored = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
        yield name, stored, dequantize_gemm(*stored.values(), 4, group).T


def _compressed_tensors_ordered() -> Iterator[Named]:
    """Groups in the order of activations. It packs zero points, but cannot read them again."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    for name, bits, ordered, symmetric in (
        ("four", 4, True, True),
        ("eight", 8, True, True),
        ("zeros", 4, True, False),
        ("unset", 4, False, True),
    ):
        args = QuantizationArgs(
            num_bits=bits, type="int", strategy="group", group_size=16, symmetric=symmetric
        )
        order = (torch.arange(64) // 16)[torch.randperm(64)].int()
        order = order if ordered else torch.full((64,), -1, dtype=torch.int32)
        half = 1 << (bits - 1)
        zeros = torch.randint(-half, half, (10, 4)).to(torch.int8)
        state = {
            "scale": (torch.rand(10, 4) / 4 + 0.01).bfloat16(),
            "zero_point": torch.zeros_like(zeros) if symmetric else zeros,
            "g_idx": order,
        }
        made = PackedQuantizationCompressor().compress_weight(
            torch.randn(10, 64, dtype=torch.bfloat16), quantization_args=args, **state
        )
        stored = {f"weight_{part}": state[part] for part in ("scale", "g_idx")} | made
        from compressed_tensors.compressors.quantized_compressors import pack_quantized

        levels = pack_quantized.unpack_from_int32(made["weight_packed"], bits, torch.Size((10, 64)))
        yield name, stored, dequantize(levels, args=args, **state)


def _compressed_tensors_eight_bits() -> Iterator[Named]:
    """FP8 and INT8 that are not packed: scales of a tensor, rows, groups and blocks."""
    from compressed_tensors.compressors import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    cases: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        "tensor": ({"strategy": "tensor"}, (1,)),
        "channel": ({"strategy": "channel"}, (40, 1)),
        "group": ({"strategy": "group", "group_size": 16}, (40, 3)),
        "block": ({"strategy": "block", "block_structure": [32, 32]}, (2, 2)),
        "int8_channel": ({"strategy": "channel", "type": "int"}, (40, 1)),
        "int8_group": ({"strategy": "group", "group_size": 16, "type": "int"}, (40, 3)),
        "int8_zeros": ({"strategy": "channel", "type": "int", "symmetric": False}, (40, 1)),
    }
    for name, (args, shape) in cases.items():
        columns = 48
        weights = QuantizationArgs(**{"num_bits": 8, "type": "float", **args})
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        state = {
            "weight": torch.randn(40, columns, dtype=torch.bfloat16),
            "weight_scale": (torch.rand(shape) / 64 + 0.001).bfloat16(),
        }
        if "zeros" in name:
            state["weight_zero_point"] = torch.randint(-128, 128, shape).to(torch.int8)
        stored = NaiveQuantizationCompressor.compress(dict(state), scheme)
        truth = NaiveQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
        yield name, stored, truth


def _compressed_tensors_exponents() -> Iterator[Named]:
    """MXFP4 and MXFP8: bytes of exponents for 32 numbers each."""
    from compressed_tensors import compressors
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    both = {4: compressors.MXFP4PackedCompressor, 8: MXFP8QuantizationCompressor}
    for bits, compressor in both.items():
        weights = QuantizationArgs(
            num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        state = {
            "weight": torch.randn(6, 96, dtype=torch.bfloat16),
            "weight_scale": torch.exp2(torch.randint(-9, 3, (6, 3)).float()).bfloat16(),
        }
        stored = compressor.compress(dict(state), scheme)
        truth = compressor.decompress(dict(stored), scheme)["weight"]
        yield f"mxfp{bits}", stored, truth


def _compressed_tensors_odd_bits() -> Iterator[Named]:
    """Integers of all other widths, that run on from one word into the next."""
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for bits in (2, 3, 5, 6, 7):
        for symmetric in (True, False):
            weights = QuantizationArgs(
                num_bits=bits, type="int", strategy="group", group_size=20, symmetric=symmetric
            )
            half = 1 << (bits - 1)
            state = {
                "weight": torch.randn(9, 160, dtype=torch.bfloat16),
                "weight_scale": (torch.rand(9, 8) / 4 + 0.01).bfloat16(),
                "weight_zero_point": torch.randint(-half, half, (9, 8)).to(torch.int8),
            }
            if symmetric:
                state["weight_zero_point"].zero_()
            scheme = QuantizationScheme(targets=["Linear"], weights=weights)
            stored = Compressor.compress(dict(state), scheme)
            truth = Compressor.decompress(dict(stored), scheme)["weight"]
            yield f"bits{bits}{'' if symmetric else '_zeros'}", stored, truth


def _deepseek_v4() -> Iterator[Named]:
    """FP8 in blocks and two floats of four bits a byte, both with ``X.scale`` in exponents."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    exponents = torch.float8_e8m0fnu
    for dtype in (torch.bfloat16, torch.float32):
        eight = torch.randn(48, 64).to(torch.float8_e4m3fn)
        grid = torch.exp2(torch.randint(-9, 9, (3, 2)).float()).to(exponents)
        four = torch.randint(-128, 128, (10, 48)).to(torch.int8)
        groups = torch.exp2(torch.randint(-9, 9, (10, 3)).float()).to(exponents)
        for kind, weight, scale in (("wq", eight, grid), ("w1", four, groups)):
            truth = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
            name = f"{kind}.{str(dtype).removeprefix('torch.')}"
            yield name, {"weight": weight, "scale": scale}, truth


def _torchao(cases: dict[str, Any], file: str) -> Iterator[Named]:
    """What is stored is a file of its own: a pickle of tensor subclasses."""
    from torchao.quantization import quantize_

    state, truth = {}, {}
    for name, (config, dtype) in cases.items():
        layer = torch.nn.Sequential(torch.nn.Linear(64, 24, bias=False, dtype=dtype))
        quantize_(layer, config)
        weight = layer.state_dict()["0.weight"]
        state[f"layer.{name}.weight"] = weight
        inner = getattr(weight, "original_weight_tensor", weight)
        truth[name] = inner.dequantize().contiguous()
    torch.save(state, HERE / file)
    for name, numbers in truth.items():
        yield name, {}, numbers


def _undeclared(dtype: str) -> Any:
    """Return an element type that torch has and whose stubs lack."""
    return getattr(torch, dtype)


def _torchao_now() -> Iterator[Named]:
    import torch.distributed.checkpoint as dcp
    import torchao.quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    of_groups, four, three = ao.PerGroup(16), _undeclared("int4"), _undeclared("int3")
    cases = {
        "int8": (ao.Int8WeightOnlyConfig(), torch.bfloat16),
        "int8_half": (ao.Int8WeightOnlyConfig(), torch.float16),
        "int8_both": (ao.Int8DynamicActivationInt8WeightConfig(), torch.bfloat16),
        "float8": (ao.Float8WeightOnlyConfig(), torch.bfloat16),
        "float8_wide": (ao.Float8WeightOnlyConfig(), torch.float32),
        "four": (ao.IntxWeightOnlyConfig(four, granularity=of_groups), torch.bfloat16),
        "three": (ao.IntxWeightOnlyConfig(three, granularity=ao.PerAxis(0)), torch.float32),
    }
    yield from _torchao(cases, "torchao_0_18_0.pt")
    state = torch.load(HERE / "torchao_0_18_0.pt", weights_only=False)
    saved = {n: t for n, t in state.items() if ".int8" in n or ".float8" in n}  # others it refuses
    with contextlib.chdir(HERE):  # the metadata records the folder as it is given
        dcp.save(saved, checkpoint_id="torchao_0_18_0_dcp", no_dist=True)
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, HERE / "torchao_0_18_0_flat.safetensors", metadata)


def _torchao_before() -> Iterator[Named]:
    import torchao.quantization as ao

    of_groups = ao.PerGroup(16)
    intx = ao.IntxWeightOnlyConfig(weight_dtype=_undeclared("int4"), granularity=of_groups)
    cases = {
        "int8": (ao.Int8WeightOnlyConfig(), torch.bfloat16),
        "int8_groups": (ao.Int8WeightOnlyConfig(group_size=16), torch.float16),
        "int8_both": (ao.Int8DynamicActivationInt8WeightConfig(), torch.bfloat16),
        "int8_int4": (ao.Int8DynamicActivationInt4WeightConfig(group_size=32), torch.float32),
        "float8": (ao.Float8WeightOnlyConfig(version=1), torch.bfloat16),
        "four": (intx, torch.bfloat16),
        "packed": (ao.UIntXWeightOnlyConfig(_undeclared("uint4"), group_size=32), torch.bfloat16),
    }
    yield from _torchao(cases, "torchao_0_13_0.pt")


WRITERS: dict[str, Callable[[], Iterator[Named]]] = {
    "bitsandbytes_0_50_2": _bitsandbytes,
    "autogptq_0_7_1": _autogptq,
    "autoawq_0_2_9": _autoawq,
    "comfy_kitchen_0_2_40": by_comfy_kitchen,
    "compressed_tensors_0_12_2": _compressed_tensors_ordered,
    "compressed_tensors_0_20_0_eight_bits": _compressed_tensors_eight_bits,
    "compressed_tensors_0_20_0_exponents": _compressed_tensors_exponents,
    "compressed_tensors_0_20_0_odd_bits": _compressed_tensors_odd_bits,
    "compressed_tensors_0_20_0_mixed": mixed_by_compressed_tensors,
    "modelopt_0_47_0_mixed": mixed_by_modelopt,
    "transformers_5_23_0_deepseek_v4": _deepseek_v4,
    "torchao_0_18_0": _torchao_now,
    "torchao_0_13_0": _torchao_before,
}


def record(writer: str) -> None:
    """Quantize random weights, and make numbers of them again."""
    torch.manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored, truth in WRITERS[writer]():
        tensors |= {
            f"stored.layer.{name}.{part}": t.contiguous().clone() for part, t in stored.items()
        }
        tensors[f"truth.layer.{name}.weight"] = truth.contiguous().clone()
    save_file(tensors, HERE / f"{writer}.safetensors")


if __name__ == "__main__":
    record(sys.argv[1])
