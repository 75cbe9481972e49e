"""GPTQ, AWQ, bitsandbytes, ComfyUI and others: numbers as those who packed them have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, convert_to, read_back
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_models import as_torch_computes, as_torch_reads, deepseek, gpt_oss
from quantized_models import saved as saved_with_index
from recorded_models import FILES, GPTQ, MIXED, saved
from recorded_weights import HERE, recorded
from safetensors.torch import save_file

import ckptool
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Unsupported

TORCHAO = ("0_18_0.pt", "0_18_0_flat.safetensors", "0_18_0_dcp", "0_13_0.pt")


UNPACKED = {"torchao_0_13_0.pt": ("layer.packed.*",)}
"""What is left out of a file: a layout that kernels alone read."""


def saved_by_torchao(file: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A recorded file, and its numbers; a DCP folder has but what torchao lets it save."""
    _, truth = recorded(f"torchao_{file[:6]}")
    left_out = {n for n in truth if ".packed" in n}
    if file.endswith("dcp"):
        left_out |= {n for n in truth if ".int8" not in n and ".float8" not in n}
    return HERE / f"torchao_{file}", {n: t for n, t in truth.items() if n not in left_out}


def read_by_torch(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """FP8 in blocks and MXFP4, whose numbers are those that torch's own reader makes."""
    experts = gpt_oss(2, 3, 4)
    blocks = {n: t for n, t in deepseek().items() if "up_proj" in n}
    source = saved_with_index({**blocks, **experts}, folder)
    block = "mlp.up_proj.weight"
    return source, {
        block: as_torch_reads(source, block, torch.bfloat16),
        "mlp.experts.down_proj": as_torch_computes(experts, torch.bfloat16),
    }


CASES = [
    *((name, "") for name, config in FILES.items() if config is not GPTQ),
    *(("autogptq_0_7_1", only) for only in ("v1", "v2")),
    *(("torchao", file) for file in TORCHAO),
    ("torch", "fp8_mxfp4"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    name, only = request.param
    folder = tmp_path_factory.mktemp("model") / "hf"
    if name == "torchao":
        return saved_by_torchao(only)
    return read_by_torch(folder) if name == "torch" else saved(name, folder, only)


Model = tuple[Path, dict[str, torch.Tensor]]


def dtypes_of(truth: dict[str, torch.Tensor]) -> set[str]:
    return {str(tensor.dtype).removeprefix("torch.") for tensor in truth.values()}


def test_numbers_are_those_of_who_packed_them(model: Model, out: Path) -> None:
    source, truth = model
    drop = UNPACKED.get(source.name, ())
    for dtype in dtypes_of(truth):
        target, casts = out / dtype, Casts(BY_NAME[dtype])
        report = convert_to("safetensors", source, target, dequantize=True, casts=casts, drop=drop)
        written = read_back("safetensors", target)
        assert written.keys() == truth.keys()
        same = {name: bits(t) for name, t in truth.items() if str(t.dtype) == f"torch.{dtype}"}
        assert {name: written[name] for name in same} == same
        assert sum(report.dequantized.values()) == len(truth.keys() - {"layer.head.weight"})
        assert "quantization_config" not in _config(target)
        assert not [path for path in target.iterdir() if path.name.endswith(".extra.pt")]


def test_each_weight_goes_by_its_own_group(out: Path) -> None:
    source, _ = saved(MIXED, out / "hf")
    report = convert_to("safetensors", source, out / "m", dequantize=True)
    found = {"packed integers": 3, "FP8": 2, "INT8": 2, "MXFP8": 2, "NVFP4": 1}
    assert report.dequantized == found


def _config(folder: Path) -> Any:
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_part_is_read_alone(model: Model, data: st.DataObject) -> None:
    """Also one that begins or ends within a byte, a word or a group."""
    source, truths = model
    name = data.draw(st.sampled_from(sorted(truths)))
    truth = truths[name]
    ranges = [
        sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in truth.shape
    ]
    index = tuple(slice(low, high) for low, high in ranges)
    dtype = str(truth.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dequantize": True, "drop": UNPACKED.get(source.name, ())}
    with ckptool.open(source, dtype=dtype, **options) as opened:
        assert bits(opened[name][index]) == bits(truth[index])


def test_load_diff_and_dcp_read_them_too(model: Model, out: Path) -> None:
    source, truth = model
    dtype, wanted = of_one_type(truth)
    options: dict[str, Any] = {"dequantize": True, "dtype": dtype, "select": sorted(wanted)}
    assert_equal_however_read(source, wanted, options, out)


def of_one_type(truth: dict[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
    """The numbers of the first type, and that type."""
    dtype = min(dtypes_of(truth))
    return dtype, {n: t for n, t in truth.items() if str(t.dtype) == f"torch.{dtype}"}


def assert_equal_however_read(
    source: Path, wanted: dict[str, torch.Tensor], options: dict[str, Any], out: Path
) -> None:
    """``load``, torch's dcp.load and ``diff`` find these numbers and no others."""
    for read in (_load, _load_by_dcp):
        state = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
        read(source, state, options)
        assert {n: bits(t) for n, t in state.items()} == {n: bits(t) for n, t in wanted.items()}
    name = min(wanted)
    for file, state in (("same", wanted), ("changed", wanted | {name: -wanted[name]})):
        save_file(state, plain := out / f"{file}.safetensors")
        assert ckptool.diff(source, plain, values=True, **options).ok == (file == "same")


def _load(source: Path, state: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    ckptool.load(source, state, **options)


def _load_by_dcp(source: Path, state: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=ckptool.dcp.CheckpointReader(source, **options), no_dist=True)


TURNED = """
name = "turned"
from = "stored"
to = "turned"

[[rule]]
from = "layer.{name}.weight [out in]"
to = "turned.{name} [in out]"
"""


def test_a_map_takes_them(model: Model, out: Path) -> None:
    """Weights turned round: a tile of the target is a column of what is stored."""
    source, truth = model
    (out / "turned.toml").write_text(TURNED.replace("{name}", "{layer}"))
    dtype, of_type = of_one_type(truth)
    wanted = {n: t for n, t in of_type.items() if t.dim() == 2}
    rules = [f"^{re.escape(name)}$=layer.{at}.weight" for at, name in enumerate(wanted)]
    turned = {f"turned.{at}": t.T.contiguous() for at, t in enumerate(wanted.values())}
    selected: dict[str, Any] = {"select": tuple(wanted), "rename": tuple(rules)}
    mapped = MapOptions(str(out / "turned.toml"))
    casts = Casts(BY_NAME[dtype])
    convert_to(
        "safetensors", source, out / "m", dequantize=True, casts=casts, map=mapped, **selected
    )
    assert read_back("safetensors", out / "m") == {n: bits(t) for n, t in turned.items()}
    options = {"dequantize": True, "dtype": dtype, "map": mapped.name, **selected}
    assert_equal_however_read(source, turned, options, out)


def test_packed_layouts_of_torchao_are_refused_by_name(out: Path) -> None:
    source = HERE / "torchao_0_13_0.pt"
    with pytest.raises(Unsupported, match=r"layer\.packed\.weight\..*: torchao, which"):
        convert_to("safetensors", source, out / "m", dequantize=True)


def test_integers_of_torchao_with_zero_points_that_are_floats_are_refused(out: Path) -> None:
    """``Int4Tensor``: two numbers a byte, and no reader but kernels of GPUs."""
    shapes = {"scale": (4, 8), "zero_point": (4, 8)}
    state = {f"a._weight_{part}": torch.ones(s).bfloat16() for part, s in shapes.items()}
    (out / "hf").mkdir()
    save_file(
        state | {"a._weight_qdata": torch.ones(8, 64, dtype=torch.int8)},
        out / "hf" / "model.safetensors",
    )
    with pytest.raises(Unsupported, match=r"a\._weight_qdata .* non-integer"):
        convert_to("safetensors", out / "hf", out / "m", dequantize=True)


@pytest.mark.parametrize("scale", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_packed_floats_of_torchao_are_refused(scale: torch.dtype, out: Path) -> None:
    """``MXTensor`` and ``NVFP4Tensor``: two floats a byte, which are not integers of eight bits."""
    state = {"a._weight_qdata": torch.ones(8, 64).byte(), "a._weight_scale": torch.ones(8, 4)}
    (out / "hf").mkdir()
    state["a._weight_scale"] = state["a._weight_scale"].to(scale)
    save_file(state, out / "hf" / "model.safetensors")
    with pytest.raises(Unsupported, match="torchao's uint8 is not supported"):
        convert_to("safetensors", out / "hf", out / "m", dequantize=True)


def test_scales_of_other_blocks_than_the_config_says_are_refused(out: Path) -> None:
    """Those of a tensor turned around would divide it evenly, too."""
    state = {"w.weight": torch.ones(256, 512).to(torch.float8_e4m3fn)}
    state["w.weight_scale_inv"] = torch.ones(4, 2)
    (out / "hf").mkdir()
    save_file(state, out / "hf" / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (out / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="do not match the blocks of 128 x 128 that"):
        convert_to("safetensors", out / "hf", out / "m", dequantize=True)
