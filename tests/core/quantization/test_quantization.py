"""Quantized checkpoints: kept unchanged, shown as what they are, and dequantized on request.

The oracle is torch's own reader of such checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, convert_to, load_torch, read_back
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import ckptool
from ckptool.commands.inspect import inspect
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.check.pairs import TensorPair
from ckptool.errors import Damaged, Unsupported, UsageError
from ckptool.render.inspect.report import inspect_json


def fp8(rows: int, columns: int, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bits, NaN among them, and scales."""
    weight = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return weight, torch.rand(-(-rows // block), -(-columns // block)) * 3 + 1e-6


def mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 32 numbers; the last dim of ``shape`` counts blocks."""
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(100, 150, shape, dtype=torch.uint8)


def deepseek(rows: int = 300, columns: int = 200) -> dict[str, torch.Tensor]:
    weight, scale = fp8(rows, columns)
    return {
        "mlp.up_proj.weight": weight,
        "mlp.up_proj.weight_scale_inv": scale,
        "norm.weight": torch.randn(5).bfloat16(),
    }


def gpt_oss(*shape: int) -> dict[str, torch.Tensor]:
    blocks, scales = mxfp4(*shape)
    return {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}


def saved(state: dict[str, torch.Tensor], folder: Path, config: Any = None) -> Path:
    """A Hugging Face folder with an index, which torch's reader wants."""
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_torch_reads(folder: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    reader = QuantizedHuggingFaceStorageReader(str(folder), target_dtype=dtype)
    shape = reader.read_metadata().state_dict_metadata[name].size
    state = {name: torch.empty(shape, dtype=dtype)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state[name]


def as_torch_computes(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """torch 2.13's reader has the formula of MXFP4, but reads only a corner of such a tensor.

    Its rows are outputs, which transformers turns.
    """
    reader = QuantizedHuggingFaceStorageReader("", target_dtype=dtype)
    *rows, groups, size = blocks.shape
    wanted = SimpleNamespace(storage_offsets=(0, 0, 0), lengths=(*rows, groups * size * 2))
    return reader._dequantize_tensor_mxfp4(blocks, scales, wanted, 0, 0).mT.contiguous()


def numbers(source: Path, out: Path, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    kind = BY_NAME[str(dtype).removeprefix("torch.")]
    convert_to("torch-save", source, out / "m.pt", dequantize=True, casts=Casts(kind), **options)
    return _flat(load_torch(out / "m.pt"))


def _flat(tree: Any, head: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {head: tree}
    steps = {f"{head}.{key}" if head else key: value for key, value in tree.items()}
    return {n: t for name, value in steps.items() for n, t in _flat(value, name).items()}


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
    expected = as_torch_computes(*state.values(), dtype)
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
        assert bits(found) == bits(as_torch_computes(*state.values(), dtype))


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
    assert raised.value.hint == f"use --drop '{left_out}' to exclude it"
    convert_to("safetensors", source, out / "m", dequantize=True, drop=(left_out,))
    assert set(read_back("safetensors", out / "m")) == {"mlp.up_proj.weight", "norm.weight"}


def test_a_causal_mask_of_bytes_is_not_a_quantized_matrix(out: Path) -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.uint8).tril()
    source = saved(deepseek() | {"h.0.attn.bias": mask}, out / "hf")
    convert_to("safetensors", source, out / "m", dequantize=True)
    assert read_back("safetensors", out / "m")["h.0.attn.bias"] == bits(mask)


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
