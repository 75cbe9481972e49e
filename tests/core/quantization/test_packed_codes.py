"""bitsandbytes' codes in a type of floats, as FSDP needs them: their bits are no numbers.

``bnb_4bit_quant_storage`` of bitsandbytes (0.50) and transformers (5.23).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, convert_to, read_back
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME

STORAGES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64]
NAMES = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "mlp.gate_proj": 128}
Tensors = dict[str, torch.Tensor]


def quantized(name: str, rows: int, columns: int, storage: torch.dtype) -> Tensors:
    """Codes of which many are NaN as floats."""
    size = rows * columns
    raw = torch.randint(0, 256, (size // 2,), dtype=torch.uint8)
    raw[: size // 4] = 0xFF
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        name: raw.view(storage).reshape(-1, 1),
        f"{name}.absmax": torch.rand(size // 64),
        f"{name}.quant_map": torch.linspace(-1, 1, 16),
        f"{name}.quant_state.bitsandbytes__nf4": text,
    }


def saved(folder: Path, storage: torch.dtype) -> Path:
    """A small model of llama with its config."""
    torch.manual_seed(7)
    embedding = torch.randn(32, 64).bfloat16()
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    tensors["model.norm.weight"] = torch.ones(64).bfloat16()
    for name, rows in NAMES.items():
        tensors |= quantized(f"model.layers.0.{name}.weight", rows, 64, storage)
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "bfloat16",
        "quantization_config": said | {"bnb_4bit_quant_storage": str(storage)[6:]},
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("storage", STORAGES)
def test_nothing_is_wrong_with_them(storage: torch.dtype, out: Path) -> None:
    source = saved(out / "hf", storage)
    report = ckptool.verify(source, fail_nonfinite=True, strict=True)
    assert report.ok, report.findings


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("options", [{}, {"casts": Casts(BY_NAME["float32"])}])
def test_a_copy_says_and_holds_the_same(
    storage: torch.dtype, options: dict[str, Any], out: Path
) -> None:
    source = saved(out / "hf", storage)
    convert_to("hf", source, out / "m", **options)
    before, after = load_file(source / "model.safetensors"), read_back("safetensors", out / "m")
    of_layers = [name for name in before if "layers" in name]
    assert {n: after[n] for n in of_layers} == {n: bits(before[n]) for n in of_layers}
    config = json.loads((out / "m" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"


def test_they_are_dequantized_alike(out: Path) -> None:
    found = []
    for storage in STORAGES:
        source = saved(out / str(storage), storage)
        convert_to("safetensors", source, out / f"{storage}-m", dequantize=True)
        found.append(read_back("safetensors", out / f"{storage}-m"))
    assert all(each == found[0] for each in found)


def test_other_nan_is_found_beside_them(out: Path) -> None:
    source = saved(out / "hf", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, source / "model.safetensors")
    found = [each for each in ckptool.verify(source).findings if each.code == "not-finite"]
    assert [each.tensor for each in found] == ["model.norm.weight"]
