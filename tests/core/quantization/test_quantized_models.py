"""What is said of quantized models, by their configs, reports and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, convert_to, read_back
from quantized_models import deepseek, fp8, gpt_oss, mxfp4, saved

import ckptool
from ckptool.commands.inspect.report import inspect
from ckptool.commands.inspect.views import inspect_json
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check.pairs import TensorPair
from ckptool.errors import Unsupported, UsageError

QUANTIZED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("inner", [False, True], ids=["on top", "in text_config"])
@pytest.mark.parametrize("target", ["safetensors", "dcp"])
def test_the_config_no_longer_says_quantized(target: str, inner: bool, out: Path) -> None:
    config: Any = {"model_type": "x", "quantization_config": QUANTIZED}
    source = saved(deepseek(), out / "hf", {"text_config": config} if inner else config)
    (source / "hf_quant_config.json").write_text("{}")
    report = convert_to(target, source, out / "m", dequantize=True)
    found = json.loads((out / "m/config.json").read_text())
    assert found == ({"text_config": {"model_type": "x"}} if inner else {"model_type": "x"})
    assert not (out / "m/hf_quant_config.json").exists()
    assert any("quantization_config removed" in note for note in report.notes)


def test_nor_does_the_config_of_assets(out: Path) -> None:
    config = {"model_type": "x", "quantization_config": QUANTIZED}
    saved(deepseek(), out / "assets", config)
    source = saved(deepseek(), out / "hf")
    options = MapOptions(assets=out / "assets")
    convert_to("safetensors", source, out / "m", dequantize=True, map=options)
    assert json.loads((out / "m/config.json").read_text()) == {"model_type": "x"}


def test_half_a_character_stays_what_it_is(out: Path) -> None:
    """JSON may have one by an escape, UTF-8 may not."""
    kept = {"model_type": "x", "_name_or_path": "a\ud800b"}
    source = saved(deepseek(), out / "hf", kept | {"quantization_config": QUANTIZED})
    convert_to("safetensors", source, out / "m", dequantize=True)
    assert json.loads((out / "m/config.json").read_text()) == kept


@pytest.mark.parametrize(("weight", "says"), [(torch.ones(2, 2), False), (None, True)])
def test_the_config_of_a_quantized_model_says_nothing_of_weights_that_were_trained(
    weight: torch.Tensor | None, says: bool, out: Path
) -> None:
    """As where the assets are those of the model that training began with."""
    config = {"model_type": "x", "expert_dtype": "fp4", "quantization_config": QUANTIZED}
    saved(deepseek(), out / "assets", config)
    (out / "assets/hf_quant_config.json").write_text("{}")
    state = deepseek() if weight is None else {"w": weight, "table": torch.ones(2, 2).long()}
    dcp.save(state, checkpoint_id=out / "run", no_dist=True)
    options = MapOptions(assets=out / "assets")
    report = convert_to("hf", out / "run", out / "m", map=options)
    assert json.loads((out / "m/config.json").read_text()) == (
        config if says else {"model_type": "x"}
    )
    assert (out / "m/hf_quant_config.json").exists() == says
    assert any("quantization_config, expert_dtype removed" in note for note in report.notes) != says
    assert ckptool.compare(out / "run", out / "m", hf_assets=out / "assets")


@pytest.mark.parametrize("scale", ["k_proj.k_scale", "weight_scale", "k_proj.output_scale"])
def test_a_config_stays_where_a_scale_shows_what_it_is_of(scale: str, out: Path) -> None:
    """As of a KV cache that is quantized beside weights that are not."""
    config = {"model_type": "x", "quantization_config": {"quant_method": "compressed-tensors"}}
    state = {"a.weight": torch.ones(2, 2), f"a.{scale}": torch.ones(1)}
    source = saved(state, out / "hf", config)
    (source / "hf_quant_config.json").write_text("{}")
    convert_to("hf", source, out / "m")
    assert json.loads((out / "m/config.json").read_text()) == config
    assert (out / "m/hf_quant_config.json").exists()


def test_what_is_left_out_of_a_plain_model_is_named(out: Path) -> None:
    source = saved({"w": torch.ones(2, 2)}, out / "hf", {"expert_dtype": "fp4"})
    (source / "hf_quant_config.json").write_text("{}")
    notes = convert_to("hf", source, out / "m").notes
    assert "config.json: expert_dtype removed, as no tensor is quantized" in notes
    assert "hf_quant_config.json left out, as no tensor is quantized" in notes


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        ("a.SCB", torch.ones(2), "bitsandbytes, 8 bit"),
        ("a.W_q", torch.ones(2, 2), "HQQ"),
        ("a.qweight", torch.ones(2, 2, dtype=torch.int32), "AWQ"),
        ("a.weight", torch.ones(2, 2, dtype=torch.int8), "int8 without scales"),
        ("a.weight", torch.ones(2, 2).to(torch.float8_e4m3fn), "float8_e4m3fn without scales"),
    ],
    ids=str,
)
def test_what_would_stay_quantized_is_refused_by_name(
    name: str, tensor: torch.Tensor, kind: str, out: Path
) -> None:
    source = saved(deepseek() | {name: tensor}, out / "hf")
    with pytest.raises(Unsupported, match=f"{name}: {kind}, which") as raised:
        convert_to("safetensors", source, out / "m", dequantize=True)
    left_out = name if "without" in kind else "a.*"
    leaves_out = f"--drop '{left_out}' leaves it out"
    assert raised.value.hint == f"what quantized it can save it in full; {leaves_out}"
    convert_to("safetensors", source, out / "m", dequantize=True, drop=(left_out,))
    assert set(read_back("safetensors", out / "m")) == {"mlp.up_proj.weight", "norm.weight"}


def test_a_causal_mask_of_bytes_is_not_a_quantized_matrix(out: Path) -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.uint8).tril()
    source = saved(deepseek() | {"h.0.attn.bias": mask}, out / "hf")
    convert_to("safetensors", source, out / "m", dequantize=True)
    assert read_back("safetensors", out / "m")["h.0.attn.bias"] == bits(mask)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"w.weight": torch.randn(3, 3)}, "no tensors with supported scales"),
        (
            {"w.weight": fp8(200, 200)[0], "w.weight_scale_inv": torch.ones(3, 7)},
            "do not match its blocks",
        ),
        (
            {"w_blocks": mxfp4(2, 3)[0], "w_scales": mxfp4(2, 4)[1]},
            "do not match its blocks",
        ),
        (gpt_oss(1, 1, 1) | {"mlp.experts.down_proj": torch.ones(1)}, "already exists"),
    ],
)
def test_what_cannot_be_done(state: dict[str, torch.Tensor], words: str, out: Path) -> None:
    with pytest.raises(Unsupported, match=words):
        convert_to("safetensors", saved(state, out / "hf"), out / "m", dequantize=True)


@pytest.mark.parametrize(
    ("selection", "names", "excluded"),
    [
        ({"drop": ("odd.weight",)}, {"w.weight", "plain"}, ("1 tensor (--drop)",)),
        ({"select": ("w.*",), "rename": ("^w=x",)}, {"x.weight"}, ("2 tensors (--select)",)),
    ],
)
def test_only_what_is_kept_must_fit_and_counts(
    selection: Any, names: set[str], excluded: tuple[str, ...], out: Path
) -> None:
    values, scales = fp8(200, 200)
    state = {"w.weight": values, "w.weight_scale_inv": scales, "plain": torch.ones(1)}
    odd = {"odd.weight": values.clone(), "odd.weight_scale_inv": torch.ones(3, 7)}
    source = saved(state | odd, out / "hf")
    report = convert_to("safetensors", source, out / "m", dequantize=True, **selection)
    assert set(read_back("safetensors", out / "m")) == names
    assert (report.dequantized, report.excluded) == ({"FP8 in blocks": 1}, excluded)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.weight", "a.weight.absmax", "a.weight.quant_state.bitsandbytes__nf4"], "bitsandbytes"),
        (["a.weight", "a.SCB"], "bitsandbytes, 8 bit"),
        (["a.qweight", "a.qzeros", "a.scales", "a.g_idx"], "GPTQ"),
        (["a.qweight", "a.qzeros", "a.scales"], "AWQ"),
        (["a.weight_packed", "a.weight_scale", "a.weight_shape"], "compressed-tensors"),
        (["a.weight", "a.weight_scale", "a.weight_scale_2"], "NVFP4"),
    ],
)
def test_quantized_tensors_are_shown_for_what_they_are(
    names: list[str], kind: str, out: Path
) -> None:
    source = saved({name: torch.zeros(2, dtype=torch.uint8) for name in names}, out / "hf")
    found = inspect_json(inspect(source))["quantized"]
    assert [(told.startswith(kind), count) for told, count in found.items()] == [(True, 1)]


def test_plain_models_are_not_called_quantized(out: Path) -> None:
    source = saved({"a.weight": torch.zeros(2), "b.scales": torch.zeros(2)}, out / "hf")
    assert inspect_json(inspect(source))["quantized"] == {}


@pytest.mark.parametrize(
    ("dtype", "became"),
    [("float16", "infinite"), ("float8_e4m3fn", "its largest"), ("bfloat16", "")],
)
def test_numbers_beyond_the_range_of_their_type_are_reported(
    dtype: str, became: str, out: Path
) -> None:
    """As many as are finite in 32 bits, and not in that type."""
    values, scale = fp8(200, 300)
    scale[0, 0] = 3000
    source = saved({"a.weight": values, "a.weight_scale_inv": scale}, out / "hf")
    report = convert_to("dcp", source, out / "m", dequantize=True, casts=Casts(BY_NAME[dtype]))
    whole = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    numbers = values.float() * whole
    most = {"float16": 65519.9, "float8_e4m3fn": 464}.get(dtype, torch.inf)
    lost = int((numbers.abs() > most).sum())
    said = [note for note in report.notes if "beyond" in note]
    assert bool(lost) == bool(became) == bool(said)
    assert all(
        note.startswith(f"{lost:,} values of 1 tensor (a.weight) became {became}") for note in said
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_was_dequantized_to_a_type_is_what_cast_compares(dtype: str, out: Path) -> None:
    """Numbers are rounded once, not to bf16 first."""
    source = saved(deepseek(), out / "hf")
    casts = {"*.weight": BY_NAME[dtype]}
    convert_to(
        "safetensors", source, out / "m", dequantize=True, casts=Casts(None, tuple(casts.items()))
    )
    compared: dict[str, Any] = {"dequantize": True, "cast": True}
    assert ckptool.compare(source, out / "m", **compared).ok
    assert not ckptool.compare(source, out / "m", dequantize=True).ok


def test_computed_numbers_are_compared_in_small_tiles(out: Path) -> None:
    """They take some twenty times their bytes while they are computed."""
    source = saved(deepseek(), out / "hf")
    with ckptool.open(source, dequantize=True, dtype="bfloat16") as opened:
        made, norm = (opened.tensors[n] for n in ("mlp.up_proj.weight", "norm.weight"))
    assert not TensorPair(made, norm).is_plain
    assert not TensorPair(norm, made).is_plain
    assert TensorPair(norm, norm).is_plain


def test_a_config_without_its_quantization_is_no_other_one(out: Path) -> None:
    """Nor is one that says something else of the model."""
    config: Any = {"model_type": "x", "quantization_config": QUANTIZED}
    source = saved(deepseek(), out / "hf", config)
    (source / "hf_quant_config.json").write_text("{}")
    convert_to("hf", source, out / "m", dequantize=True)
    assert not ckptool.compare(source, out / "m", dequantize=True).verify.findings
    (out / "m" / "config.json").write_text('{"model_type": "y"}')
    found = ckptool.compare(source, out / "m", dequantize=True).verify.findings
    assert [finding.code for finding in found] == ["companion-differs"]


def test_a_map_over_quantized_weights_wants_numbers(out: Path) -> None:
    source = saved({f"model.{n}": t for n, t in deepseek().items()}, out / "hf")
    with pytest.raises(UsageError) as caught:
        convert_to("dcp", source, out / "m", map=MapOptions("auto"))
    assert "--dequantize" in (caught.value.hint or "")
