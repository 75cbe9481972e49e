"""Models of several formats, as compressed-tensors 0.20.0 and ModelOpt 0.47.0 write them.

``recorded_weights.py`` records them, and what the libraries write into config.json beside.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
Named = tuple[str, dict[str, torch.Tensor], torch.Tensor]
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
GROUPS: dict[str, dict[str, Any]] = {
    "four": {
        "targets": [r"re:.*\.four", r"re:.*\.both", "layer.four_by_name"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    },
    "three": {
        "targets": [r"re:.*\.three"],
        "weights": {"num_bits": 3, "strategy": "channel"},
    },
    "eight": {
        "targets": [r"re:.*\.eight"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": BY_TOKEN | {"type": "float"},
    },
    "blocks": {
        "targets": [r"re:.*\.blocks"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [16, 32],
        },
    },
    "bytes": {  # four bits, but one number a byte
        "targets": [r"re:.*_by_name", r"re:.*\.bytes"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 16},
        "input_activations": BY_TOKEN,
    },
    "floats": {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    },
    "exponents": {
        "targets": [r"re:.*\.exponents", r"re:.*\.bo.*"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
        },
    },
}
"""Groups of one ``quantization_config``, as their library takes them."""
LAYERS = (*GROUPS, "four_by_name", "bytes_by_name", "both", "head")
"""Their modules. A name comes before patterns, and these in the order of their text."""
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def mixed_by_compressed_tensors() -> Iterator[Named]:
    """Yield weights of a model that is compressed and decompressed as a whole."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = torch.nn.Module()
    model.layer = torch.nn.ModuleDict(
        {name: torch.nn.Linear(64, 24, bias=False, dtype=torch.bfloat16) for name in LAYERS}
    )
    schemes = {name: QuantizationScheme(**group) for name, group in GROUPS.items()}
    config = QuantizationConfig(config_groups=schemes, ignore=["re:.*head$"])
    apply_quantization_config(model, config)
    for name, module in model.layer.items():
        for part, values in module.named_parameters():
            if part == "weight_scale":
                values.data = (torch.rand(values.shape) / 16 + 0.02).to(values.dtype)
                if name == "floats":
                    values.data *= 3000
                if name in ("exponents", "both"):
                    values.data = torch.exp2(torch.randint(-9, -5, values.shape)).to(values.dtype)
            elif part == "weight_global_scale":
                values.data.fill_(1234.5)
            elif part == "weight_zero_point" and values.dtype == torch.int8 and "four" in name:
                values.data = torch.randint(-8, 8, values.shape).to(torch.int8)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with tempfile.TemporaryDirectory() as folder:
        compressor.update_config(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
    text = json.dumps(config["quantization_config"], indent=1) + "\n"
    (HERE / "compressed_tensors_0_20_0_mixed.json").write_text(text)
    stored = {
        name: {part: values.detach().clone() for part, values in module.state_dict().items()}
        for name, module in model.layer.items()
    }
    compressor.decompress_model(model)
    for name, module in model.layer.items():
        yield name, stored[name], module.get_parameter("weight").detach()


def mixed_by_modelopt() -> Iterator[Named]:
    """Yield weights of a folder that is exported; ``model.layers`` is called ``layer`` here."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    def part(where: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for rule in config["quant_cfg"]:
            if rule["quantizer_name"] in ("*weight_quantizer", "*input_quantizer"):
                yield {**rule, "quantizer_name": where + rule["quantizer_name"]}

    model = LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16()
    rules = [
        {"quantizer_name": "*", "enable": False},
        *part("*self_attn", mtq.FP8_DEFAULT_CFG),
        *part("*0.mlp.gate_proj", mtq.NVFP4_DEFAULT_CFG),
        *part("*0.mlp.up_proj", mtq.NVFP4_DEFAULT_CFG),
        *part("*0.mlp.down_proj", mtq.MXFP8_DEFAULT_CFG),
        *part("*1.mlp.gate_proj", mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG),
        *part("*1.mlp.up_proj", mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG),
        *part("*1.mlp.down_proj", mtq.W4A16_NVFP4_CFG),
    ]
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 8))
    mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, lambda each: each(tokens))
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        stored = load_file(Path(folder) / "model.safetensors")
        text = (Path(folder) / "hf_quant_config.json").read_text()
        config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    files = {"mixed": json.dumps(config, indent=1) + "\n", "hf_quant_config": text}
    for name, content in files.items():
        short = content.replace("model.layers.", "layer.")
        (HERE / f"modelopt_0_47_0_{name}.json").write_text(short)
    for name in sorted(config["quantized_layers"]):
        parts = {n.removeprefix(f"{name}."): t for n, t in stored.items() if n.startswith(name)}
        parts.pop("input_scale", None)
        yield name.removeprefix("model.layers."), parts, _numbers_by_modelopt(parts)


def _numbers_by_modelopt(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """What ModelOpt's own tensors are dequantized to, in float32."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    values, scale, wide = parts["weight"], parts["weight_scale"], torch.float32
    if "weight_scale_2" in parts:
        scales = {"scale": scale, "double_scale": parts["weight_scale_2"], "block_sizes": {-1: 16}}
        shape = torch.Size((values.shape[0], 2 * values.shape[1]))
        return NVFP4QTensor(shape, wide, values).dequantize(wide, **scales)
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(values.shape, wide, values).dequantize(wide, scale=scale)
    column = scale[:, None] if scale.dim() else scale
    return FP8QTensor(values.shape, wide, values).dequantize(wide, scale=column)
