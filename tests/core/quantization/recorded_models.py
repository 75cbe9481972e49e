"""Recorded files of quantized weights, as models on a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from recorded_weights import HERE, recorded
from safetensors.torch import save_file

GPTQ = {"quant_method": "gptq", "desc_act": True, "dynamic": {}}
"""Layers of several widths, which GPTQModel says by ``dynamic``."""


EIGHT_BITS = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "a": {"targets": ["re:.*block$"], "weights": {"block_structure": [32, 32]}},
        "t": {"targets": ["layer.tensor"], "weights": {"strategy": "tensor"}},
        "b": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 16}},
    },
}


ODD_BITS = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        str(n): {
            "targets": [rf"re:layer\.bits{n}"],
            "weights": {"num_bits": n, "group_size": 20},
        }
        for n in (2, 3, 5, 6, 7)
    },
}


MIXED, MODELOPT = "compressed_tensors_0_20_0_mixed", "modelopt_0_47_0_mixed"
"""Models of several formats, and the configs that their libraries themselves write of them."""


FILES: dict[str, dict[str, Any] | None] = {
    "bitsandbytes_0_50_2": {"quant_method": "bitsandbytes"},
    "autogptq_0_7_1": GPTQ,
    "autoawq_0_2_9": {"quant_method": "awq", "version": "gemm"},
    "comfy_kitchen_0_2_40": None,
    "compressed_tensors_0_12_2": None,
    "compressed_tensors_0_20_0": None,
    "compressed_tensors_0_20_0_eight_bits": EIGHT_BITS,
    "compressed_tensors_0_20_0_exponents": None,
    "compressed_tensors_0_20_0_odd_bits": ODD_BITS,
    **{name: json.loads((HERE / f"{name}.json").read_text()) for name in (MIXED, MODELOPT)},
    "transformers_5_23_0_deepseek_v4": {"quant_method": "fp8", "weight_block_size": [16, 32]},
}
"""The recorded files, and the quantization_config that lies beside such a model."""


FORMATS = {"v1": "gptq", "v2": "gptq_v2"}


def save_shards(stored: dict[str, torch.Tensor], folder: Path) -> None:
    """What belongs together lies in two shards."""
    values = ("weight", "_packed", "qweight")
    for shard, of_values in (("1", True), ("2", False)):
        file = folder / f"model-0000{shard}-of-00002.safetensors"
        save_file({n: t for n, t in stored.items() if n.endswith(values) == of_values}, file)


def saved(name: str, folder: Path, only: str = "") -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with what is stored under names that begin with ``only``, and its numbers."""
    head = f"layer.{only}"
    parts = [{n: t for n, t in part.items() if n.startswith(head)} for part in recorded(name)]
    folder.mkdir()
    save_shards(parts[0], folder)
    config = FILES[name]
    if config is not None:
        form = {"checkpoint_format": FORMATS[only[:2]]} if config is GPTQ else {}
        text = json.dumps({"quantization_config": config | form})
        (folder / "config.json").write_text(text)
    return folder, parts[1]
