"""Computed numbers: what is read in another type equals what convert writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, case, flat, load_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptool
from ckptool.dcp import CheckpointReader
from ckptool.errors import Unsupported

Tensors = dict[str, torch.Tensor]


def quantized() -> Tensors:
    """As DeepSeek-V3, gpt-oss and compressed-tensors store weights, beside plain ones."""
    torch.manual_seed(5)
    return {
        "deep.weight": torch.randint(0, 256, (150, 140), dtype=torch.uint8).view(
            torch.float8_e4m3fn
        ),
        "deep.weight_scale_inv": torch.rand(2, 2) + 0.1,
        "moe_blocks": torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8),
        "moe_scales": torch.randint(120, 134, (3, 5, 2), dtype=torch.uint8),
        "rows.weight": torch.randint(-128, 128, (6, 9), dtype=torch.int8),
        "rows.weight_scale": torch.rand(6, 1),
        "norm.weight": torch.randn(7),
        "steps": torch.arange(4),
    }


@pytest.fixture(scope="module", params=["bf16", "fp32", "fp16"])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, str]:
    """A checkpoint, what convert makes of it, and as which type."""
    folder = tmp_path_factory.mktemp(request.param)
    save_file(quantized(), folder / "m.safetensors")
    options: Any = {"dtype": request.param, "dequantize": True, "fsync": False}
    ckptool.convert(folder / "m.safetensors", folder / "m.pt", to="torch-save", **options)
    return folder / "m.safetensors", flat_tensors(folder / "m.pt"), request.param


def flat_tensors(path: Path) -> Tensors:
    return flat(load_torch(path))


def slices(size: int) -> st.SearchStrategy[slice]:
    return st.builds(slice, st.integers(0, size), st.integers(0, size))


@settings(max_examples=25)
@given(data=st.data())
def test_any_box_is_what_convert_writes(both: tuple[Path, Tensors, str], data: Any) -> None:
    path, wanted, dtype = both
    name = data.draw(st.sampled_from(sorted(wanted)))
    index = tuple(data.draw(slices(size)) for size in wanted[name].shape)
    one = ckptool.open(path, dtype=dtype, dequantize=True)
    assert bits(one.read(name, index)) == bits(wanted[name][index])


@pytest.mark.parametrize("way", ["load", "dcp"])
def test_a_state_dict_is_filled_with_numbers(both: tuple[Path, Tensors, str], way: str) -> None:
    path, wanted, dtype = both
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    if way == "load":
        ckptool.load(path, state, dtype=dtype, dequantize=True)
    else:
        reader = CheckpointReader(path, dtype=dtype, dequantize=True)
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert {n: bits(t) for n, t in state.items()} == {n: bits(t) for n, t in wanted.items()}


@pytest.mark.parametrize("name", ["dcp_zstd", "deepspeed_zero_3", "snapshot_batched"])
def test_a_cast_of_any_format(name: str, out: Path) -> None:
    ckptool.convert(case(name).path, out / "m.pt", to="torch-save", dtype="bf16", fsync=False)
    wanted = flat_tensors(out / "m.pt")
    one = ckptool.open(case(name).path, dtype=torch.bfloat16)
    assert {n: bits(one.read(n)) for n in one.tensors} == {n: bits(t) for n, t in wanted.items()}


@pytest.mark.parametrize("way", ["load", "dcp"])
def test_a_state_dict_of_several_types(tmp_path: Path, way: str) -> None:
    """Every floating tensor is cast to its own type there; the rest is not."""
    save_file(quantized(), tmp_path / "m.safetensors")
    kinds = [torch.bfloat16, torch.float32, torch.float16]
    asked = dict(zip(("deep.weight", "rows.weight", "norm.weight"), kinds, strict=True))
    state = {}
    for name, dtype in asked.items():
        one = ckptool.open(tmp_path / "m.safetensors", dtype=dtype, dequantize=True)
        state[name] = torch.zeros_like(one.read(name)), bits(one.read(name))
    filled = {name: zeros for name, (zeros, _) in state.items()}
    if way == "load":
        options: Any = {"strict": False, "cast": True, "dequantize": True}
        ckptool.load(tmp_path / "m.safetensors", filled, **options)
    else:
        reader = CheckpointReader(tmp_path / "m.safetensors", cast=True, dequantize=True)
        dcp.load(filled, storage_reader=reader, no_dist=True)
    assert {n: bits(t) for n, t in filled.items()} == {
        n: wanted for n, (_, wanted) in state.items()
    }


@pytest.mark.parametrize("name", ["steps", "deep.weight", "deep.weight_scale_inv"])
def test_what_is_not_a_number_by_itself_is_not_cast(tmp_path: Path, name: str) -> None:
    save_file(quantized(), tmp_path / "m.safetensors")
    state = {name: torch.zeros(quantized()[name].shape, dtype=torch.float16)}
    with pytest.raises(Unsupported, match=f"{name}: .* in the checkpoint, float16"):
        ckptool.load(tmp_path / "m.safetensors", state, strict=False, cast=True)


def test_quantized_weights_stay_as_they_are_under_a_cast(both: tuple[Path, Tensors, str]) -> None:
    one = ckptool.open(both[0], dtype="bf16")
    kinds = {name: entry.dtype.name for name, entry in one.tensors.items()}
    assert kinds["deep.weight"] == "float8_e4m3fn"
    assert kinds["deep.weight_scale_inv"] == "float32"
    assert kinds["norm.weight"] == "bfloat16"


def test_nothing_to_make_numbers_of() -> None:
    with pytest.raises(Unsupported, match="no tensors with supported scales"):
        ckptool.open(case("dcp_base").path, dequantize=True)
