"""Experts under the Hub's names, quantized ones, and those that files hold packed."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, convert_to, flat, load_dcp, read_back
from expert_families import FAMILIES, OF_THEIR_OWN, SMALL, made_of, on_the_hub
from safetensors.torch import load_file, save_file

from ckptool.commands.keymap.check import check_map
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import UsageError

transformers = pytest.importorskip("transformers")


EIGHT_BITS = re.compile(
    r".*(\.attn\.(\w+\.)?w(q_a|q_b|kv|o_a|o_b)|shared_experts\.w\d|mtp\.0\.e_proj)\.weight"
)


FOUR_BITS = re.compile(r".*\.experts\.\d+\.w\d\.weight")


QUANTIZED = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


def deepseek_of_the_hub(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """DeepSeek V4 as released, with a layer that predicts more; its model and numbers.

    Experts have two floats of four bits in an int8, other projections are FP8 in blocks. The model
    is what transformers loads from the numbers, as ``Fp8Dequantize`` makes them.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    sizes = SMALL | FAMILIES["DeepseekV4"] | {"hidden_size": 64, "intermediate_size": 32}
    sizes |= {"q_lora_rank": 32, "o_lora_rank": 32, "moe_intermediate_size": 32}
    made = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**sizes)).bfloat16()
    made.save_pretrained(folder / "bare")
    file = load_file(folder / "bare" / "model.safetensors")
    file = {on_the_hub("DeepseekV4", name): tensor for name, tensor in file.items()}
    last = {
        name: tensor for name, tensor in file.items() if re.match(r"layers\.1\.(ffn|hc_)", name)
    }
    file |= {name.replace("layers.1.", "mtp.0."): tensor.clone() for name, tensor in last.items()}
    file |= {"mtp.0.e_proj.weight": torch.randn(64, 64), "mtp.0.enorm.weight": torch.randn(64)}
    stored, numbers = {}, {}
    for name, tensor in file.items():
        stored[name] = numbers[name] = tensor.float() if tensor.is_floating_point() else tensor
        rows, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
        grid = (rows, columns // 32) if FOUR_BITS.fullmatch(name) else (1, 1)
        if FOUR_BITS.fullmatch(name):
            stored[name] = torch.randint(-128, 128, (rows, columns // 2)).to(torch.int8)
        elif EIGHT_BITS.fullmatch(name):
            stored[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        if stored[name].element_size() == 1:
            exponents = torch.exp2(torch.randint(-9, 9, grid).float()).to(torch.float8_e8m0fnu)
            stored[name.replace(".weight", ".scale")] = exponents
            dequantize = Fp8Dequantize(None)._dequantize_one
            numbers[name] = dequantize(stored[name], exponents, torch.bfloat16)
    config = json.loads((folder / "bare" / "config.json").read_text())
    (folder / "hub").mkdir()
    save_file(stored, folder / "hub" / "model.safetensors", {"format": "pt"})
    config |= {"quantization_config": QUANTIZED, "expert_dtype": "fp4"}
    (folder / "hub" / "config.json").write_text(json.dumps(config))
    return made, numbers


def test_deepseek_v4_of_the_hub_becomes_the_model_in_memory_and_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    made, numbers = deepseek_of_the_hub(tmp_path)
    asked = MapOptions("transformers-deepseek-v4")
    assert "use --dequantize" in str(check_map(tmp_path / "hub", asked).hint)
    with pytest.raises(UsageError) as refused:
        convert_to("dcp", tmp_path / "hub", tmp_path / "dcp", map=asked)
    assert "use --dequantize" in str(refused.value.hint)
    quantized: dict[str, Any] = {"dequantize": True, "map": MapOptions(experts="packed")}
    convert_to("dcp", tmp_path / "hub", tmp_path / "dcp", **quantized)
    state = flat(load_dcp(tmp_path / "dcp"))
    config = MapOptions(experts="separate", assets=tmp_path / "hub")
    convert_to("hf", tmp_path / "dcp", tmp_path / "back", map=config)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {n: bits(t) for n, t in back.items()} == {n: bits(t) for n, t in numbers.items()}
    loaded = type(made).from_pretrained(tmp_path / "back", dtype="auto").state_dict()
    assert {*state} - {*loaded} == {name for name in numbers if name.startswith("mtp.")}
    for name, tensor in loaded.items():
        assert bits(state[name].to(tensor.dtype)) == bits(tensor), name


@pytest.mark.parametrize("family", OF_THEIR_OWN)
def test_experts_that_files_hold_packed_are_linears_one_by_one(family: str, tmp_path: Path) -> None:
    """The model gives the same with its experts computed from the separate tensors."""
    torch.manual_seed(3)
    made = made_of(family).eval()
    for tensor in made.parameters():
        tensor.data.normal_(std=0.2)
    made.save_pretrained(tmp_path / "hf")
    asked = MapOptions(experts="separate")
    report = convert_to("hf", tmp_path / "hf", tmp_path / "out", map=asked)
    (note,) = (note for note in report.notes if "transformers does not load separate ones" in note)
    assert made.config.model_type in note.partition(" have packed experts")[0]
    separate = load_file(tmp_path / "out" / "model.safetensors")
    modules = {n: m for n, m in made.named_modules() if n.endswith(".experts")}
    assert modules
    for name, module in modules.items():
        first = f"{name}.0."
        assert {n for n in separate if n.startswith(first)} >= {
            f"{first}{part}_proj.weight" for part in ("gate", "up", "down")
        }
        assert not [n for n in separate if n.startswith(f"{name}.gate_up_proj")]
        states = torch.randn(3, 5, SMALL["hidden_size"])
        for expert in range(3):
            wanted = _packed(module, states[expert], expert)
            computed = _linears(separate, f"{name}.{expert}", states[expert], family)
            torch.testing.assert_close(computed, wanted, rtol=1e-5, atol=1e-6)  # CPUs differ
    convert_to("hf", tmp_path / "out", tmp_path / "back", map=MapOptions(experts="packed"))
    back = read_back("safetensors", tmp_path / "back")
    assert back == read_back("safetensors", tmp_path / "hf")


def _packed(module: Any, states: torch.Tensor, expert: int) -> torch.Tensor:
    """What the model's own module makes of states that all go to one expert."""
    if len(signature(module.forward).parameters) == 3:
        chosen = torch.full((len(states), 1), expert)
        return module(states, chosen, torch.ones(len(states), 1)).detach()
    others = torch.zeros(module.num_experts, *states.shape)
    others[expert] = states
    return module(others.flatten(0, 1)).view_as(others)[expert].detach()


def _linears(
    separate: dict[str, torch.Tensor], name: str, states: torch.Tensor, family: str
) -> torch.Tensor:
    """An expert as it is written down for one: a gate, an up and a down projection."""

    def project(part: str, states: torch.Tensor) -> torch.Tensor:
        bias = separate.get(f"{name}.{part}_proj.bias")
        return torch.nn.functional.linear(states, separate[f"{name}.{part}_proj.weight"], bias)

    gate, up = project("gate", states), project("up", states)
    if family == "GptOss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return project("down", (up + 1) * gate * torch.sigmoid(gate * 1.702))
    return project("down", torch.nn.functional.silu(gate) * up)
