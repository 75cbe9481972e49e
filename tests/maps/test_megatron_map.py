"""The map of Megatron's layout agrees with a real Megatron-core checkpoint.

``megatron_0_20_0.safetensors`` holds the model's tensors as Megatron-core 0.20.0 stored them (TP 2,
PP 2, DP 2, torch_dist): layers stacked, vocabulary padded to 112. ``megatron_0_20_0.json`` has the
SHA-256 of what they are under Hugging Face's names. It was made from the parameters of the
unsharded Megatron model, one module a layer, with linear_qkv sliced by query group as Megatron-LM's
tools/checkpoint does and linear_fc1 halved.

``megatron_0_16_1_latent_*.safetensors`` are what Megatron-core 0.16.1 stored (TP 2, EP 2) of a
model with latent attention, a layer without experts, one with, and one that predicts further
tokens, as torch_dist and in its rank files. It had loaded random weights from Hugging Face's names
(DeepseekV3), with which it gave the logits of transformers; ``megatron_0_16_1_latent.json`` has
their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import convert_to
from safetensors.torch import load_file, save_file

from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported

HERE = Path(__file__).parent
DIMS = {"kv": 2, "dim": 8, "vocab": 103}


@pytest.fixture
def stored() -> dict[str, torch.Tensor]:
    return load_file(HERE / "megatron_0_20_0.safetensors")


@pytest.fixture
def truth() -> dict[str, Any]:
    return json.loads((HERE / "megatron_0_20_0.json").read_text())


def described(path: Path) -> dict[str, Any]:
    """Shape and SHA-256 of every tensor of a safetensors file."""
    return {
        name: {
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest(),
        }
        for name, tensor in load_file(path).items()
    }


def a_layer_each(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As legacy and non-homogeneous checkpoints have them, gate and up apart."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        _, layers, rest = name.partition("decoder.layers.")
        if not layers:
            found[name] = tensor
            continue
        for layer, part in enumerate(tensor):
            if rest == "mlp.linear_fc1.weight":
                gate, up = part.chunk(2)
                found[f"{layers}{layer}.{rest}_w"] = gate.contiguous()
                found[f"{layers}{layer}.{rest}_v"] = up.contiguous()
            else:
                found[f"{layers}{layer}.{rest}"] = part.contiguous()
    return found


@pytest.mark.parametrize("arranged", [dict, a_layer_each])
def test_to_hugging_face(
    arranged: Any, stored: dict[str, torch.Tensor], truth: dict[str, Any], out: Path
) -> None:
    save_file(arranged(stored), out / "a.safetensors")
    options = MapOptions("auto", DIMS)
    report = convert_to("safetensors", out / "a.safetensors", out / "hf", map=options)
    assert report.map.name == "megatron-gpt"
    assert described(out / "hf" / "model.safetensors") == truth


def test_a_projection_without_a_gate_is_not_halved(
    stored: dict[str, torch.Tensor], out: Path
) -> None:
    name = "decoder.layers.mlp.linear_fc1.weight"
    save_file(stored | {name: stored[name][:, :48].contiguous()}, out / "a.safetensors")
    with pytest.raises(Unsupported, match="ffn is"):
        convert_to("dcp", out / "a.safetensors", out / "b", map=MapOptions("megatron-gpt", DIMS))


def test_and_back_to_all_but_the_padding(stored: dict[str, torch.Tensor], out: Path) -> None:
    save_file(stored, out / "a.safetensors")
    there = MapOptions("megatron-gpt", DIMS)
    convert_to("safetensors", out / "a.safetensors", out / "hf.safetensors", map=there)
    back = MapOptions("megatron-gpt", DIMS | {"extra": 9})
    convert_to("safetensors", out / "hf.safetensors", out / "b.safetensors", map=back)
    found = load_file(out / "b.safetensors")
    embedding = "embedding.word_embeddings.weight"
    words = stored[embedding]
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[n], stored[n]) for n in stored if n != embedding)
    assert torch.equal(found[embedding][:103], words[:103])
    assert torch.equal(found[embedding][103:], words[102:103].expand(9, -1))


@pytest.mark.parametrize("kind", ["torch_dist", "legacy"])
def test_latent_attention_experts_and_further_tokens(kind: str, out: Path) -> None:
    source = HERE / f"megatron_0_16_1_latent_{kind}.safetensors"
    options = MapOptions("auto", {"vocab": 37, "layers": 2})
    report = convert_to("safetensors", source, out / "hf", map=options)
    assert report.map.name == "megatron-deepseek-v3"
    truth = json.loads((HERE / "megatron_0_16_1_latent.json").read_text())
    assert described(out / "hf" / "model.safetensors") == truth
    back = MapOptions("megatron-deepseek-v3", {"extra": 3, "layers": 2})
    convert_to("safetensors", out / "hf", out / "back.safetensors", map=back)
    stored = load_file(source)
    found = load_file(out / "back.safetensors")
    if kind == "torch_dist":
        assert found.keys() == stored.keys()
    words = "embedding.word_embeddings.weight"
    padded = {words, "output_layer.weight"}
    same = found.keys() & stored.keys() - padded
    assert len(same) > 20
    assert all(torch.equal(found[n], stored[n]) for n in same)
    assert torch.equal(found[words][:37], stored[words][:37])
