"""What contradicts a quantization, or is not known to fit it, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, convert_to, read_back
from recorded_models import FILES, MIXED, MODELOPT, save_shards, saved
from recorded_weights import HERE, recorded
from safetensors.torch import load_file, save_file

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.names import kinds
from ckptool.errors import Damaged, Unsupported


def changed(
    name: str, only: str, folder: Path, part: str, value: torch.Tensor | None, config: Any = None
) -> Path:
    """A folder of recorded weights of which one part is another."""
    source, _ = saved(name, folder, only)
    stored = {n: t for n, t in recorded(name)[0].items() if n.startswith(f"layer.{only}")}
    if value is not None:
        (key,) = [n for n in stored if n.endswith(part)]
        stored[key] = value
    save_shards(stored, source)
    if config is not None:
        (source / "config.json").write_text(json.dumps({"quantization_config": config}))
    return source


ODD = "compressed_tensors_0_20_0_odd_bits"


V1, V2 = "v1.4_16_ordered", "v2.4_16_ordered"


ZEROS = torch.full((4, 4), -1, dtype=torch.int32)


BNB, AWQ, EARLIER = "bitsandbytes_0_50_2", "autoawq_0_2_9", "compressed_tensors_0_12_2"


def of_all(**weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors that says one thing of all weights."""
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}


def of_layers(names: str, **weights: Any) -> dict[str, Any]:
    """The same, of the modules that a pattern names."""
    return {"config_groups": {"a": {"targets": [f"re:{names}"], "weights": weights}}}


def of_group(name: str, **changed: Any) -> dict[str, Any]:
    """What compressed-tensors says of a model of several formats, one group of it changed."""
    said: dict[str, Any] = dict(FILES[MIXED] or {})
    group = said["config_groups"][name]
    own = {"format": changed.pop("format")} if "format" in changed else {}
    group = group | own | {"weights": group["weights"] | changed}
    return said | {"config_groups": said["config_groups"] | {name: group}}


def of_layer(name: str, **changed: Any) -> dict[str, Any]:
    """What ModelOpt says of a model of several formats, one layer of it changed."""
    said: dict[str, Any] = dict(FILES[MODELOPT] or {})
    layers = said["quantized_layers"]
    layer = layers[f"layer.{name}"] | changed
    return said | {"quantized_layers": layers | {f"layer.{name}": layer}}


WORDS, EIGHT = "compressed_tensors_0_20_0", "compressed_tensors_0_20_0_eight_bits"


MX = "compressed_tensors_0_20_0_exponents"


METHOD = {"quant_method": "bitsandbytes"}


NAMED = of_layers("layer[.]nvfp4$", num_bits=4, type="int", group_size=16)


LATER = {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}


STATE = torch.tensor(list(b"[]"), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "only", "part", "value", "config", "words"),
    [
        ("autogptq_0_7_1", V1, "", None, {}, "zero points in two ways"),
        (
            "autogptq_0_7_1",
            V1,
            "",
            None,
            {"checkpoint_format": "marlin"},
            "marlin is not supported",
        ),
        ("autogptq_0_7_1", V1, "", None, {"quant_method": "vptq"}, "says vptq"),
        ("autogptq_0_7_1", V1, "qzeros", ZEROS, None, "a zero point of 15"),
        ("autogptq_0_7_1", V1, "", None, {"bits": 8}, "says bits 8, the tensors 4"),
        ("autogptq_0_7_1", V1, "", None, {"group_size": 32}, "group_size 32, the tensors 16"),
        ("autogptq_0_7_1", V1, "g_idx", torch.arange(64).int(), None, "outside the 4"),
        ("autogptq_0_7_1", V1, "g_idx", torch.arange(63).int(), None, "does not match its columns"),
        ("autogptq_0_7_1", V1, "scales", torch.ones(4, 32).int(), None, "not float"),
        (AWQ, "group", "", None, {"version": "gemv"}, "version gemv is not supported"),
        (AWQ, "group", "", None, {"bits": 8}, "says bits 8, the tensors 4"),
        (AWQ, "group", "", None, {"group_size": 64}, "says group_size 64, the tensors 32"),
        (AWQ, "group", "qzeros", ZEROS, None, "do not match it"),
        (BNB, "int8_bfloat16", "_format", torch.tensor(1, dtype=torch.uint8), None, "is not row"),
        (BNB, "int8_bfloat16", "SCB", torch.ones(3), None, "do not match"),
        (BNB, "nf4_odd", "bitsandbytes__nf4", STATE, None, "has no shape"),
        (BNB, "nf4_odd", "absmax", torch.ones(2), None, "do not match the shape"),
        (BNB, "nf4_nested", "nested_absmax", torch.ones(3), None, "nested scales do not match"),
        (EARLIER, "four", "g_idx", (torch.arange(64) // 17).int(), None, "of 16 columns each"),
        (EARLIER, "four", "g_idx", torch.arange(64), None, "do not match"),
        (EARLIER, "four", "", None, LATER, "says num_bits 8, the tensors 4"),
        (EARLIER, "four", "", None, of_all(type="float"), "says type float, the tensors int"),
        (EARLIER, "four", "", None, of_all(symmetric=False), "no .*weight_zero_point"),
        (WORDS, "nvfp4", "", None, NAMED, "says type int, the tensors float"),
        (WORDS, "nvfp4", "", None, of_all(num_bits=8), "says num_bits 8, the tensors 4"),
        (WORDS, "modelopt", "", None, of_all(group_size=32), "says group_size 32, the tensors 16"),
        (WORDS, "nvfp4", "", None, METHOD, "says bitsandbytes, the tensors NVFP4"),
        (WORDS, "group", "", None, {"quant_method": "fp8"}, "says fp8, the tensors packed int"),
        (EIGHT, "int8_channel", "", None, of_all(type="float"), "says type float, the tensors int"),
        (EIGHT, "tensor", "", None, of_all(num_bits=4), "says num_bits 4, the tensors 8"),
        (EIGHT, "tensor", "", None, {"quant_method": "torchao"}, "says torchao, the tensors FP8"),
        (MX, "mxfp4", "", None, of_all(group_size=16), "says group_size 16, the tensors 32"),
        (MX, "mxfp8", "", None, of_all(num_bits=4), "says num_bits 4, the tensors 8"),
        (BNB, "nf4_odd", "", None, {"quant_method": "awq"}, "says awq, the tensors bitsandbytes"),
        ("autogptq_0_7_1", V1, "", None, METHOD, "says bitsandbytes, the tensors GPTQ"),
        (ODD, "bits3", "", None, {}, "do not match its blocks"),
        (ODD, "bits3_zeros", "packed", torch.ones(9, 11).int(), None, "do not match its blocks"),
        (ODD, "bits3_zeros", "shape", torch.tensor([9, 150]), None, "in another order"),
        (ODD, "bits7_zeros", "shape", torch.tensor([9, 140]), None, "do not match its blocks"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    name: str, only: str, part: str, value: Any, config: Any, words: str, out: Path
) -> None:
    source = changed(name, only, out / "hf", part, value, config)
    with pytest.raises((Unsupported, Damaged), match=words) as raised:
        convert_to("safetensors", source, out / "m", dequantize=True)
    assert f"layer.{only}." in str(raised.value)
    assert not (out / "m").exists()


Q, UP = "1.self_attn.q_proj", "0.mlp.up_proj"


BOTH = of_group("group_4", format=None) | {"format": "pack-quantized"}


@pytest.mark.parametrize(
    ("name", "only", "config", "words"),
    [
        (MIXED, "eight", of_group("group_2", format="int-quantized"), "int-quantized, .* FP8"),
        (MIXED, "four.", of_group("group_0", format="nvfp4-pack-quantized"), "packed integers"),
        (
            MIXED,
            "four_by",
            of_group("group_0", format="mxfp6-pack-quantized"),
            "group_0 of .* mxfp6",
        ),
        (MIXED, "bytes.", of_group("group_4", format=None), "group_4 of .* num_bits 4, .* 8"),
        (MIXED, "bytes.", BOTH, "group_4 of .* says pack-quantized, the tensors INT8"),
        (
            MIXED,
            "eight",
            of_group("group_2", strategy="tensor"),
            r"tensor, .*24, 1\], one per 1 x 64",
        ),
        (MIXED, "eight", of_group("group_2", strategy="block", block_structure=[8, 8]), "1 x 64"),
        (MIXED, "blocks", of_group("group_3", strategy="channel"), r"2, 2\], one per 16 x 32"),
        (MIXED, "bytes.", of_group("group_4", strategy="channel"), "channel, .* one per 1 x 16"),
        (MIXED, "four_by", of_group("group_0", strategy="tensor"), r"24, 4\], one per 1 x 16"),
        (MIXED, "floats", of_group("group_5", strategy="channel"), "channel, .* one per 1 x 16"),
        (MIXED, "exponents", of_group("group_6", strategy="tensor"), "tensor, .* one per 1 x 32"),
        (MODELOPT, UP, of_layer(UP, quant_algo="FP8"), "layers of .* says FP8, the tensors NVFP4"),
        (MODELOPT, UP, of_layer(UP, group_size=8), "says group_size 8, the tensors 16"),
        (
            MODELOPT,
            "1.mlp.up",
            of_layer("1.mlp.up_proj", quant_algo="W4A8_AWQ"),
            "W4A8_AWQ, .* FP8",
        ),
        (MODELOPT, Q, of_layer(Q, quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), "channel, .* 32 x 32"),
    ],
)
def test_a_group_that_contradicts_the_tensors_is_refused(
    name: str, only: str, config: dict[str, Any], words: str, out: Path
) -> None:
    source = changed(name, only, out / "hf", "", None, config)
    with pytest.raises(Unsupported, match=words) as raised:
        convert_to("safetensors", source, out / "m", dequantize=True)
    assert f"layer.{only}" in str(raised.value)
    assert "--hf-assets" in str(raised.value.hint)


def test_what_modelopt_says_may_lie_in_its_own_file(out: Path) -> None:
    """As it does alone before ModelOpt 0.29."""
    source, _ = saved(MODELOPT, out / "hf", UP)
    (source / "config.json").unlink()
    text = (HERE / "modelopt_0_47_0_hf_quant_config.json").read_text()
    (source / "hf_quant_config.json").write_text(text)
    convert_to("safetensors", source, out / "m", dequantize=True)
    (source / "hf_quant_config.json").write_text(text.replace('"NVFP4"', '"MXFP8"'))
    with pytest.raises(Unsupported, match="says MXFP8, the tensors NVFP4"):
        convert_to("safetensors", source, out / "n", dequantize=True)


@pytest.mark.parametrize("part", ["pre_quant_scale", "svdquant_lora_a"])
def test_weights_whose_module_computes_with_more_than_them_are_refused(
    part: str, out: Path
) -> None:
    stored = {n: t for n, t in recorded(MODELOPT)[0].items() if n.startswith(f"layer.{UP}")}
    (source := out / "hf").mkdir()
    save_file(stored | {f"layer.{UP}.{part}": torch.ones(32)}, source / "model.safetensors")
    with pytest.raises(Unsupported, match=rf"up_proj\.{part} .*which its numbers leave out"):
        convert_to("safetensors", source, out / "m", dequantize=True)


@pytest.mark.parametrize("ignored", ["layer.nvfp4", "re:.*nvfp4$", "layer.n*"])
def test_a_config_says_nothing_of_what_it_ignores(ignored: str, out: Path) -> None:
    config = of_all(num_bits=8) | {"ignore": [ignored], **METHOD}
    source = changed(WORDS, "nvfp4", out / "hf", "", None, config)
    convert_to("safetensors", source, out / "m", dequantize=True, drop=("*_wide.*",))
    _, truth = recorded(WORDS)
    written = read_back("safetensors", out / "m")
    assert written == {"layer.nvfp4.weight": bits(truth["layer.nvfp4.weight"])}


def without(name: str, only: str, part: str, config: dict[str, Any], folder: Path) -> Path:
    """A folder of recorded weights without one of the parts."""
    stored = {n: t for n, t in recorded(name)[0].items() if n.startswith(f"layer.{only}.")}
    kept = {n: t for n, t in stored.items() if not n.endswith(part)}
    assert len(kept) == len(stored) - 1
    folder.mkdir()
    save_shards(kept, folder)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


@pytest.mark.parametrize(
    ("name", "only", "config", "words"),
    [
        ("autogptq_0_7_1", V1, {"desc_act": True}, "says desc_act, but no .*g_idx"),
        (EARLIER, "four", of_all(actorder="group"), "says actorder group, but no .*g_idx"),
    ],
)
def test_groups_in_another_order_are_refused_without_that_order(
    name: str, only: str, config: dict[str, Any], words: str, out: Path
) -> None:
    source = without(name, only, "g_idx", config, out / "hf")
    with pytest.raises(Unsupported, match=words):
        convert_to("safetensors", source, out / "m", dequantize=True)


@pytest.mark.parametrize(
    ("weight", "part", "scale", "config", "words"),
    [
        (torch.float8_e4m3fn, "scale_inv", (4, 2), None, "do not match its blocks"),
        (torch.float8_e4m3fn, "scale_inv", (), [128, 128], "is one scale, but .* says 8 blocks"),
    ],
)
def test_scales_that_may_be_of_another_tensor_are_refused(
    weight: torch.dtype, part: str, scale: tuple[int, ...], config: Any, words: str, out: Path
) -> None:
    """Those that are turned round would divide the tensor, too: blocks of 64 x 256."""
    state = {"a.weight": torch.ones(256, 512).to(weight), f"a.weight_{part}": torch.ones(scale)}
    (out / "hf").mkdir()
    save_file(state, out / "hf" / "model.safetensors")
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": config}}
    (out / "hf" / "config.json").write_text(json.dumps(said if config else {}))
    with pytest.raises(Unsupported, match=words):
        convert_to("safetensors", out / "hf", out / "m", dequantize=True)


@pytest.mark.parametrize("scales", [(2, 1, 1), (2, 1, 8)])
def test_scales_of_whole_columns_and_matrices_need_no_config(
    scales: tuple[int, ...], out: Path
) -> None:
    """As experts have them that are stored with their inputs first."""
    scale = torch.arange(1.0, 1 + scales[0] * scales[2]).reshape(scales)
    state = {"a.weight": torch.ones(2, 4, 8).to(torch.float8_e4m3fn), "a.weight_scale_inv": scale}
    (out / "hf").mkdir()
    save_file(state, out / "hf" / "model.safetensors")
    convert_to("safetensors", out / "hf", out / "m", dequantize=True)
    numbers = load_file(out / "m" / "model.safetensors")["a.weight"]
    assert torch.equal(numbers.float(), scale.expand(2, 4, 8))


@pytest.mark.parametrize("dynamic", [None, {"-:.*mlp": {}}])
def test_a_last_group_of_gptq_may_have_fewer_columns(dynamic: Any, out: Path) -> None:
    """Of 40 columns, 32 and 8: of 20 each they would be as many groups."""
    state = {
        "a.qweight": torch.full((5, 8), 0x22222222, dtype=torch.int32),
        "a.qzeros": torch.zeros(2, 1, dtype=torch.int32),
        "a.scales": torch.tensor([[1.0] * 8, [4.0] * 8]).half(),
    }
    (out / "hf").mkdir()
    save_file(state, out / "hf" / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    (out / "hf" / "config.json").write_text(json.dumps({"quantization_config": config}))
    if dynamic:
        with pytest.raises(Unsupported, match=r"groups of 32 columns or of 20: .* no a\.g_idx"):
            convert_to("safetensors", out / "hf", out / "m", dequantize=True)
        return
    convert_to("safetensors", out / "hf", out / "m", dequantize=True)
    numbers = load_file(out / "m" / "model.safetensors")["a.weight"]
    assert numbers.tolist() == [[1.0] * 32 + [4.0] * 8] * 8


def test_nvfp4_has_groups_of_16(out: Path) -> None:
    state = {"a.weight": torch.ones(16, 64).byte(), "a.weight_scale_2": torch.tensor(0.5)}
    state["a.weight_scale"] = torch.ones(16, 4).to(torch.float8_e4m3fn)
    (out / "hf").mkdir()
    save_file(state, out / "hf" / "model.safetensors")
    with pytest.raises(Unsupported, match="do not match its blocks"):
        convert_to("safetensors", out / "hf", out / "m", dequantize=True)


def test_the_config_may_lie_elsewhere(out: Path) -> None:
    """AutoGPTQ's own file, and that of ``--hf-assets``."""
    source, truth = saved("autogptq_0_7_1", out / "hf", "v2")
    assets = out / "assets"
    assets.mkdir()
    (source / "config.json").rename(assets / "config.json")
    options: dict[str, Any] = {"dequantize": True, "casts": Casts(BY_NAME["float16"])}
    convert_to("safetensors", source, out / "a", map=MapOptions(assets=assets), **options)
    form = {"checkpoint_format": "gptq_v2"}
    (source / "quantize_config.json").write_text(json.dumps(form))
    convert_to("safetensors", source, out / "b", **options)
    wanted = {name: bits(tensor) for name, tensor in truth.items()}
    assert read_back("safetensors", out / "a") == read_back("safetensors", out / "b") == wanted
    assert not (out / "b" / "quantize_config.json").exists()


def test_the_kinds_are_named() -> None:
    found = kinds(open_checkpoint(HERE / "torchao_0_18_0.pt").catalog)
    assert found == {"torchao": 7}
    found = kinds(open_checkpoint(HERE / "bitsandbytes_0_50_2.safetensors").catalog)
    assert found == {"bitsandbytes NF4": 7, "bitsandbytes FP4": 2, "bitsandbytes INT8": 2}
