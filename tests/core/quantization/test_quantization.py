"""Quantized checkpoints: kept unchanged, or made numbers as their readers compute them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, convert_to, read_back
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_models import (
    as_torch_computes,
    as_torch_reads,
    deepseek,
    fp8,
    gpt_oss,
    mxfp4,
    numbers,
    saved,
)

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.placement import parse_mesh
from ckptool.errors import Damaged, Unsupported

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 1), (130, 257), (127, 1000)])
def test_fp8_blocks_are_what_torch_reads(
    shape: tuple[int, int], dtype: torch.dtype, out: Path
) -> None:
    source = saved(deepseek(*shape), out / "hf")
    found = numbers(source, out, dtype)
    assert found.keys() == {"mlp.up_proj.weight", "norm.weight"}
    expected = as_torch_reads(source, "mlp.up_proj.weight", dtype)
    assert bits(found["mlp.up_proj.weight"]) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1, 1), (3, 500, 70)])
def test_mxfp4_is_what_torch_computes(
    shape: tuple[int, int, int], dtype: torch.dtype, out: Path
) -> None:
    """The last is of several tiles."""
    state = gpt_oss(*shape)
    found = numbers(saved(state, out / "hf"), out, dtype)
    expected = as_torch_computes(state, dtype)
    assert found.keys() == {"mlp.experts.down_proj"}
    assert bits(found["mlp.experts.down_proj"]) == bits(expected)


@pytest.mark.parametrize("through", ["files", "map"])
def test_gpt_oss_computes_what_transformers_makes_of_it(through: str, out: Path) -> None:
    """A model that is quantized as on the Hub; its experts are as wide as its states, as there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    config = transformers.GptOssConfig(**sizes, **heads, vocab_size=37)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = dict(model.state_dict())
    for part, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        name = f"model.layers.0.mlp.experts.{part}"
        del state[name]
        state[f"{name}_blocks"], state[f"{name}_scales"] = mxfp4(3, rows, 2)
        state[f"{name}_scales"].clamp_(118, 124)
    quantized = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    source, target = saved(state, out / "hf", quantized), out / "plain"
    read = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source, **read, dtype="float32")
    options: dict[str, Any] = {"dequantize": True, "casts": Casts(BY_NAME["float32"])}
    if through == "map":
        convert_to("dcp", source, out / "megatron", map=MapOptions("megatron-gpt-oss"), **options)
        back = MapOptions("megatron-gpt-oss", assets=target)
        target.mkdir()
        (target / "config.json").write_text(json.dumps(config.to_dict()))
        convert_to("hf", out / "megatron", target := out / "again", map=back)
    else:
        convert_to("hf", source, target, **options)
    found = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    words = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(found(words).logits, wanted(words).logits)


def test_every_exponent_of_mxfp4(out: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).expand(1, 16, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).expand(1, 16, 256)
    state = {"w_blocks": blocks.contiguous(), "w_scales": scales.contiguous()}
    source = saved(state, out / "hf")
    for dtype in DTYPES:
        (out / str(dtype)).mkdir()
        found = numbers(source, out / str(dtype), dtype)["w"]
        assert bits(found) == bits(as_torch_computes(state, dtype))


@settings(max_examples=25)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    cut=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_chunks_of_values_and_scales(
    rows: int, columns: int, cut: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A DCP folder of rows: what one box of numbers needs lies in several chunks."""
    torch.manual_seed(seed)
    out = tmp_path_factory.mktemp("chunks")
    state = deepseek(rows, columns)
    source = saved(state, out / "hf")
    convert_to("dcp", source, out / "dcp")
    options = ReshardOptions(parse_mesh(str(1 + cut)))
    prepare_reshard(out / "dcp", out / "cut", options).run()
    expected = as_torch_reads(source, "mlp.up_proj.weight", torch.bfloat16)
    assert bits(numbers(out / "cut", out, torch.bfloat16)["mlp.up_proj.weight"]) == bits(expected)


@pytest.mark.parametrize(
    ("block", "said"), [(128, None), (64, 64), (32, 32), (100, 100), (4, None)]
)
def test_the_block_is_what_the_config_says_or_128_or_what_divides(
    block: int, said: int | None, out: Path
) -> None:
    weight, scale = fp8(200, 300, block)
    config = {"quantization_config": {"weight_block_size": [said, said]}} if said else None
    state = {"w.weight": weight, "w.weight_scale_inv": scale}
    found = numbers(saved(state, out / "hf", config), out, torch.float32)["w.weight"]
    whole = scale.repeat_interleave(block, 0)[:200].repeat_interleave(block, 1)[:, :300]
    assert bits(found) == bits(weight.float() * whole)


def test_experts_in_one_tensor(out: Path) -> None:
    weight = torch.stack([fp8(130, 200)[0] for _ in range(3)])
    scale = torch.rand(3, 2, 2)
    state = {"experts.up": weight, "experts.up_scale_inv": scale}
    found = numbers(saved(state, out / "hf"), out, torch.float32)["experts.up"]
    whole = scale.repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)[:, :, :200]
    assert bits(found) == bits(weight.float() * whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (70,), (70, 1)], ids=str)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_one_scale_for_a_tensor_or_a_row(
    stored: torch.dtype, shape: tuple[int, ...], dtype: torch.dtype, out: Path
) -> None:
    weight = torch.randint(0, 256, (70, 90), dtype=torch.uint8).view(stored)
    state = {"a.weight": weight, "a.weight_scale": torch.rand(shape).bfloat16() + 0.1}
    found = numbers(saved(state, out / "hf"), out, dtype)
    scale = state["a.weight_scale"].float().reshape(-1, 1)
    assert found.keys() == {"a.weight"}
    assert bits(found["a.weight"]) == bits((weight.float() * scale).to(dtype))


def test_a_scale_that_is_a_weight_of_its_own_is_none(out: Path) -> None:
    state = {"a.weight": torch.zeros(3, 3), "a.weight_scale": torch.ones(())}
    with pytest.raises(Unsupported, match="no tensors with supported scales"):
        convert_to("safetensors", saved(state, out / "hf"), out / "m", dequantize=True)


def test_without_being_asked_bytes_and_scales_stay(out: Path) -> None:
    state = deepseek()
    source = saved(state, out / "hf")
    report = convert_to("safetensors", source, out / "m", casts=Casts(BY_NAME["float32"]))
    found = read_back("safetensors", out / "m")
    kept = {n: bits(t) for n, t in state.items() if "up_proj" in n}
    assert {n: found[n] for n in kept} == kept
    assert found["norm.weight"][0] == "float32"
    assert any("--dequantize" in note for note in report.notes)


def test_a_report_says_what_was_done(out: Path) -> None:
    source = saved(deepseek() | gpt_oss(2, 3, 4), out / "hf")
    report = convert_to("safetensors", source, out / "m", dequantize=True)
    assert report.dequantized == {"FP8 in blocks": 1, "MXFP4": 1}
    assert read_back("safetensors", out / "m")["mlp.up_proj.weight"][0] == "bfloat16"


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,)], ids=str)
@pytest.mark.parametrize("strategy", ["tensor", "channel", None])
def test_a_weight_without_elements_has_none(
    shape: tuple[int, ...], strategy: str | None, out: Path
) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    config = {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}
    }
    state = {
        "a.weight": torch.zeros(shape).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(1),
    }
    source = saved(state, out / "hf", config)
    assert numbers(source, out, torch.bfloat16)["a.weight"].shape == shape


STACKED = """
name = "stacked"
summary = "experts apart <-> experts turned, in one tensor"
from = "apart"
to = "stacked"

[[rule]]
from = "experts.{expert}.up.weight [ffn hidden]"
to = "up [expert hidden ffn]"

[[rule]]
from = "mlp.up_proj.weight"
to = "mlp"

[[rule]]
from = "norm.weight"
to = "norm"

[[rule]]
from = "qkv.weight [(two pair) hidden]"
to = "qkv [(pair two) hidden]"

[dims]
two = 2
pair = []
"""


def test_a_map_goes_over_the_numbers(out: Path) -> None:
    """In one step as in two: stacked, turned, and interleaved."""
    state = deepseek()
    for name, (rows, columns) in {
        "experts.0.up": (130, 200),
        "experts.1.up": (130, 200),
        "qkv": (260, 40),
    }.items():
        state[f"{name}.weight"], state[f"{name}.weight_scale_inv"] = fp8(rows, columns)
    source = saved(state, out / "hf")
    (out / "stacked.toml").write_text(STACKED)
    options = MapOptions(name=str(out / "stacked.toml"), inverse=False)
    convert_to("safetensors", source, out / "one", dequantize=True, map=options)
    convert_to("safetensors", source, out / "numbers", dequantize=True)
    convert_to("safetensors", out / "numbers", out / "two", map=options)
    found = read_back("safetensors", out / "one")
    assert found == read_back("safetensors", out / "two")
    assert found["up"][1] == (2, 200, 130)


def test_checksums_of_values_and_scales_are_checked(out: Path) -> None:
    torch.save(deepseek(), out / "s.pt")
    data = bytearray((out / "s.pt").read_bytes())
    tensors = open_checkpoint(out / "s.pt").catalog.tensors
    for name in ("mlp.up_proj.weight", "mlp.up_proj.weight_scale_inv"):
        spoilt = bytearray(data)
        spoilt[tensors[name].chunks[0].at.offset] ^= 1
        (out / "spoilt.pt").write_bytes(spoilt)
        with pytest.raises(Damaged, match="CRC-32"):
            convert_to("safetensors", out / "spoilt.pt", out / "m", dequantize=True)
