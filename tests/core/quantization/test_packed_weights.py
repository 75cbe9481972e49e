"""Integers and floats of four and eight bits in words: what compressed-tensors and ModelOpt read.

Their own results are recorded beside, see ``compressed_weights.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_weights import recorded
from conftest import convert_to
from safetensors.torch import save_file

from ckptool.commands.open import open_checkpoint
from ckptool.core.quantization.names import kinds
from ckptool.errors import Unsupported

STORED, _ = recorded()


def of_layer(name: str) -> dict[str, torch.Tensor]:
    """What is stored of the weight of this name."""
    return {n: t for n, t in STORED.items() if n.startswith(name)}


def saved(state: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(STORED, tmp_path_factory.mktemp("packed") / "hf")


def test_the_kinds_are_named(model: Path) -> None:
    assert kinds(open_checkpoint(model).catalog) == {"packed integers": 7, "NVFP4": 3}


@pytest.mark.parametrize(
    ("layer", "part", "value"),
    [
        ("group", "shape", torch.tensor([6, 25])),
        ("group", "shape", torch.tensor([6, 60])),
        ("group", "shape", torch.tensor([6.0, 24.0])),
        ("group", "scale", torch.ones(6, 5)),
        ("group", "scale", torch.ones(3, 6)),
        ("group_zeros", "zero_point", torch.ones(10, 2, dtype=torch.int32)),
        ("group_zeros", "zero_point", torch.ones(2, 2)),
        ("nvfp4", "scale", torch.ones(4, 5).to(torch.float8_e4m3fn)),
        ("nvfp4", "global_scale", torch.ones(2)),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    layer: str, part: str, value: torch.Tensor, out: Path
) -> None:
    name = f"layer.{layer}.weight"
    source = saved(of_layer(name) | {f"{name}_{part}": value}, out / "hf")
    with pytest.raises(Unsupported, match=f"{name}_packed .* do not match"):
        convert_to("safetensors", source, out / "m", dequantize=True)
    assert not (out / "m").exists()


@pytest.mark.parametrize(
    ("layer", "part", "dtype"),
    [
        ("group", "scale", torch.int32),
        ("nvfp4", "scale", torch.uint8),
        ("nvfp4", "scale", torch.float32),
        ("nvfp4", "global_scale", torch.int32),
    ],
)
def test_scales_of_another_type_are_refused(
    layer: str, part: str, dtype: torch.dtype, out: Path
) -> None:
    """Bytes of exponents would be read as the numbers 0 to 255."""
    state = of_layer(name := f"layer.{layer}.weight")
    scales = {f"{name}_{part}": state[f"{name}_{part}"].float().to(dtype)}
    source = saved(state | scales, out / "hf")
    with pytest.raises(Unsupported, match=rf"{name}_{part} are \w+, not float"):
        convert_to("safetensors", source, out / "m", dequantize=True)


def test_block_scales_of_bytes_are_refused(out: Path) -> None:
    values = torch.ones(128, 128).to(torch.float8_e4m3fn)
    scales = torch.full((1, 1), 127, dtype=torch.uint8)
    source = saved({"a.weight": values, "a.weight_scale_inv": scales}, out / "hf")
    with pytest.raises(Unsupported, match=r"a\.weight_scale_inv are uint8, not float"):
        convert_to("safetensors", source, out / "m", dequantize=True)
