"""Floats of eight bits beside a scale of any name are neither cast nor dequantized without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import convert_to, read_back
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged, Unsupported

FP8 = torch.tensor([[1.0, -2.0], [0.5, 4.0]]).to(torch.float8_e4m3fn)
SCALE = torch.tensor(0.5)
BF16 = Casts(BY_NAME["bfloat16"])


def saved(out: Path, **tensors: torch.Tensor) -> Path:
    named = {name.replace("__", "."): tensor.clone() for name, tensor in tensors.items()}
    save_file(named, out / "in.safetensors")
    return out / "in.safetensors"


UNKNOWN = {
    "fc__weight": [
        *("fc__descale", "fc__weight_scaling_factor", "fc__weight__scale", "fc__w_absmax"),
        *("fc__weight_quantizer__scale", "fc_scale", "fc__weight_amax", "fc__Scale", "fc__scales"),
        *("scaled_fp8", "fc__weight_scale_1", "fc__weight_sf", "fc__weight_dequant"),
        *("fc__quantizer__scale", "fc__weight_fake_quant__scale", "fc__fp8_meta__scale_fwd"),
        *("scales__fc__weight", "weight_scales__fc"),
    ],
    "experts__gate_up_proj": [
        *("experts__gate_up_proj_qscale", "experts__gate_up_proj__scale", "experts__scales"),
        *("experts__gate_up_proj_scales", "experts__scale_gate_up_proj", "scaled_fp8"),
    ],
}
UNKNOWN |= {
    "fc__qkv_weight": ["fc__qkv_scale", "fc__qkv_scale_inv"],
    "fc__weight_fp8": ["fc__weight_scale"],
    "fc___weight_data": ["fc___weight_scale"],
    "model__fc__weight": ["scales__fc__weight", "model_scales__fc"],
}
CASES = [(name, scale) for name, scales in UNKNOWN.items() for scale in scales]


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_a_scale_of_an_unknown_name_stops_a_cast(name: str, scale: str, out: Path) -> None:
    source = saved(out, **{name: FP8, scale: SCALE})
    words = f"{name}: float8_e4m3fn with {scale}".replace("__", r"\.")
    with pytest.raises(Unsupported, match=words):
        convert_to("safetensors", source, out / "m", casts=BF16)
    with pytest.raises(Unsupported, match=name.replace("__", r"\.")):
        convert_to("safetensors", source, out / "d", dequantize=True)
    with (
        ckptool.open(source) as opened,
        pytest.raises(Unsupported, match="a cast would leave it out"),
    ):
        opened.read(name.replace("__", "."), dtype="bf16")
    convert_to("safetensors", source, out / "same")
    assert read_back("safetensors", out / "same").keys() == load_file(source).keys()


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("fc__weight", "fc__qscale_weight"),
        ("fc__weight", "fc__scale_weight"),
        ("fc__weight", "fc__weight_scale"),
        ("fc__weight", "fc__scale"),
        ("experts__gate_up_proj", "experts__gate_up_proj_scale"),
    ],
)
def test_a_scale_of_a_known_name_is_used(name: str, scale: str, out: Path) -> None:
    source = saved(out, **{name: FP8, scale: SCALE})
    convert_to("safetensors", source, out / "m", dequantize=True, casts=BF16)
    written = load_file(out / "m" / "model.safetensors")
    assert written.keys() == {name.replace("__", ".")}
    (numbers,) = written.values()
    assert torch.equal(numbers, (FP8.float() * SCALE).bfloat16())


def test_scales_of_experts_are_of_columns_too(out: Path) -> None:
    """fbgemm's in Llama 4: one for each output, which are the columns there."""
    weight = torch.randn(3, 64, 96).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 1, 96)
    source = saved(out, experts__gate_up_proj=weight, experts__gate_up_proj_scale=scales)
    convert_to("safetensors", source, out / "m", dequantize=True, casts=BF16)
    written = load_file(out / "m" / "model.safetensors")["experts.gate_up_proj"]
    assert torch.equal(written, (weight.float() * scales).bfloat16())


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"norm__scale": torch.ones(2)},  # Flux's query_norm.scale
        {"norm__scale": torch.ones(2).to(torch.float8_e4m3fn)},
        {"logit_scale": torch.tensor(4.6)},
        {"fc__norm__scale": torch.ones(2), "out_scale": torch.tensor(1.0)},
        {"upscales__0__weight": torch.ones(2), "in_proj_weight": torch.ones(2)},
        {"ln__weight": torch.ones(2), "layer_scale_1": torch.ones(2)},
    ],
)
def test_floats_without_a_scale_are_cast(others: dict[str, Any], out: Path) -> None:
    source = saved(out, fc__weight=FP8, text_projection=FP8, **others)
    convert_to("safetensors", source, out / "m", casts=BF16)
    written = load_file(out / "m" / "model.safetensors")
    assert torch.equal(written["fc.weight"], FP8.bfloat16())
    assert torch.equal(written["text_projection"], FP8.bfloat16())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int8])
def test_packed_integers_of_no_known_kind_are_refused(dtype: torch.dtype, out: Path) -> None:
    """Such as AMD Quark's INT4: words in ``X.weight`` with ``X.weight_zero_point``."""
    words = torch.ones(4, 2).to(dtype)
    source = saved(
        out, fc__weight=FP8, fc__scale=SCALE, q__weight=words, q__weight_offset=torch.ones(4, 1)
    )
    with pytest.raises(Unsupported, match=r"q\.weight: u?int[0-9]+ without scales, which"):
        convert_to("safetensors", source, out / "m", dequantize=True)


def folder_of(out: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    (out / "hf").mkdir()
    saved(out, **tensors).rename(out / "hf" / "model.safetensors")
    (out / "hf" / "config.json").write_text(json.dumps(config))
    return out / "hf"


@pytest.mark.parametrize("method", ["fp8", "mystery"])
def test_a_config_that_says_quantized_stops_a_cast(method: str, out: Path) -> None:
    """Whatever its scale is called, or where it is."""
    said = {"quantization_config": {"quant_method": method}}
    source = folder_of(out, said, fc__weight=FP8, fc__other=torch.ones(2, 2))
    with pytest.raises(Unsupported, match=r"fc\.weight: .* quantization_config says"):
        convert_to("hf", source, out / "m", casts=BF16)
    with (
        ckptool.open(source) as opened,
        pytest.raises(Unsupported, match="quantization_config says"),
    ):
        opened.read("fc.weight", dtype="bf16")


def test_a_config_that_says_nothing_of_it_stops_no_cast(out: Path) -> None:
    source = folder_of(out, {"model_type": "mine", "dtype": "float8_e4m3fn"}, fc__weight=FP8)
    convert_to("hf", source, out / "m", casts=BF16)
    assert torch.equal(load_file(out / "m" / "model.safetensors")["fc.weight"], FP8.bfloat16())


@pytest.mark.parametrize(
    ("weight", "scale", "words"),
    [
        (torch.ones(4, 2, dtype=torch.int32), torch.ones(4, 1), "int32 with"),
        (torch.ones(4, 32, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.uint8), "uint8 with"),
        (torch.ones(4, 32, dtype=torch.int8), torch.ones(4, 1), "says quark, the tensors INT8"),
    ],
)
def test_weights_of_quark_other_than_fp8_are_refused(
    weight: torch.Tensor, scale: torch.Tensor, words: str, out: Path
) -> None:
    """AMD Quark 0.13: words in another order, MX formats, and integers with zero points."""
    said = {"quantization_config": {"quant_method": "quark"}}
    source = folder_of(out, said, fc__weight=weight, fc__weight_scale=scale)
    with pytest.raises(Unsupported, match=words):
        convert_to("hf", source, out / "m", dequantize=True)
    convert_to("hf", source, out / "same")
    assert json.loads((out / "same" / "config.json").read_text()) == said


EXCLUDING: list[dict[str, Any]] = [
    {"select": ["*.weight"]},
    {"drop": ["*scale*"]},
    {"rename": ["scale=other"]},
]


@pytest.mark.parametrize("options", EXCLUDING)
@pytest.mark.parametrize("scale", ["fc__weight_scale", "fc__scale_weight", "fc__descale"])
@pytest.mark.parametrize("dtype", ["bf16", "*=bf16"])
def test_a_scale_that_is_left_out_stops_a_cast(
    scale: str, options: dict[str, Any], dtype: str, out: Path
) -> None:
    source, target = saved(out, fc__weight=FP8, **{scale: SCALE}), out / "m.safetensors"
    words = rf"^fc\.weight: float8_e4m3fn with {scale.replace('__', '.')}, which may be its scale"
    with pytest.raises(Unsupported, match=words):
        ckptool.convert(source, target, dtype=dtype, **options)
    ckptool.convert(source, target, **options)
    assert "fc.weight" in load_file(target)


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        (torch.ones(4, 2).to(torch.uint32), "fc__scales"),
        (torch.ones(4, 2, dtype=torch.int32), "fc__weight_scale"),
        (torch.ones(4, 2, dtype=torch.uint8), "fc__weight__absmax"),
    ],
)
def test_a_scale_of_packed_integers_is_not_rounded(
    words: torch.Tensor, scale: str, out: Path
) -> None:
    """MLX's, AMD Quark's, and bitsandbytes' without their state."""
    source = saved(out, fc__weight=words, n__weight=torch.ones(2), **{scale: torch.ones(4, 1)})
    full = scale.replace("__", ".")
    with pytest.raises(Unsupported, match=rf"^{full}: may be the scale of fc\.weight"):
        convert_to("safetensors", source, out / "m", casts=BF16)
    of_n = Casts(rules=(("n.*", BY_NAME["bfloat16"]),))
    convert_to("safetensors", source, out / "n", casts=of_n)
    assert load_file(out / "n" / "model.safetensors")[full].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "dtype"), [("bias", torch.uint8), ("bias", torch.bool), ("index", torch.int32)]
)
def test_a_scale_beside_a_mask_or_an_index_is_cast(
    name: str, dtype: torch.dtype, out: Path
) -> None:
    source = saved(out, **{f"attn__{name}": torch.ones(2, 2).to(dtype)}, attn__scale=torch.rand(3))
    convert_to("safetensors", source, out / "m", casts=BF16)
    written = load_file(out / "m" / "model.safetensors")
    assert (written[f"attn.{name}"].dtype, written["attn.scale"].dtype) == (dtype, torch.bfloat16)


def test_a_flat_weight_with_a_scale_is_not_called_numbers(out: Path) -> None:
    packed = torch.ones(8, dtype=torch.uint8)
    tensors = {"fc__weight": packed, "fc__weight__absmax": torch.ones(1)}
    source = saved(out, g__weight=FP8, g__weight_scale=SCALE, **tensors)
    with pytest.raises(Unsupported, match=r"^fc\.weight: uint8 with fc\.weight\.absmax"):
        convert_to("safetensors", source, out / "m", dequantize=True)


def test_parts_of_nf4_by_torchao_are_not_cast(out: Path) -> None:
    """``NF4Tensor`` of torchao (0.18), whose inner tensors torch.save keeps."""
    floats = {f"w.{name}": torch.rand(3) for name in ("quantization_factor", "nf4")}
    codes = {"w.quantized_scalers": torch.ones(3, dtype=torch.int8)}
    codes["w.quantized_data"] = torch.ones(6, dtype=torch.uint8)
    torch.save(floats | codes | {"n.weight": torch.ones(3)}, out / "m.pt")
    convert_to("torch-save", out / "m.pt", out / "n.pt", casts=BF16)
    written = torch.load(out / "n.pt")
    assert {name: written[name].dtype for name in floats} == dict.fromkeys(floats, torch.float32)
    with pytest.raises(Unsupported, match=r"quantized_scalers: NF4 by torchao"):
        convert_to("torch-save", out / "m.pt", out / "o.pt", dequantize=True)


NO_SIZES: list[Any] = ["2x2", [2], [2.0, 2.0], [0, 2], [2, 2, 2], {}]
NOT_SAID: list[Any] = [
    "fp8",
    ["fp8"],
    *({"weight_block_size": size} for size in NO_SIZES),
    {"config_groups": {"g": {"targets": ["Linear"], "weights": {"block_structure": "2x2"}}}},
]


@pytest.mark.parametrize("said", NOT_SAID)
def test_blocks_that_are_said_and_not_understood_are_not_guessed(said: Any, out: Path) -> None:
    scales = {"fc__weight_scale_inv": torch.ones(1, 1)}
    source = folder_of(out, {"quantization_config": said}, fc__weight=FP8, **scales)
    with pytest.raises((Damaged, Unsupported), match=r"not an object|is not the two sizes"):
        convert_to("hf", source, out / "m", dequantize=True)
    convert_to("hf", source, out / "same")


@pytest.mark.parametrize("said", [None, {}, {"weight_block_size": None}])
def test_what_is_said_to_be_none_is_no_config(said: Any, out: Path) -> None:
    scales = {"fc__weight_scale_inv": torch.ones(1, 1)}
    source = folder_of(out, {"quantization_config": said}, fc__weight=FP8, **scales)
    convert_to("hf", source, out / "m", dequantize=True)
