"""Masters of which the lower 16 bits are stored, beside weights of bf16 that have the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import convert_to
from safetensors.torch import load_file

from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Unsupported

STATE = "optimizer.state.param"


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and the remainder, as Transformer Engine's FusedAdam splits a master (2.9)."""
    halves = master.view(torch.int16).reshape(*master.shape, 2)
    lower, upper = halves[..., 0].clone(), halves[..., 1].clone()
    return torch.where(lower < 0, upper + 1, upper).view(torch.bfloat16), lower


def masters(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 50
    odd = torch.tensor([0.0, -0.0, 1.0, 2.0**-149, -(2.0**-126), 65280.0, 1.00390625, -1.01171875])
    values.view(-1)[: odd.numel()] = odd
    return values


def written(path: Path) -> dict[str, torch.Tensor]:
    """Write layers that are stacked, and one matrix; return the masters by their names."""
    truth = {f"{STATE}.decoder.layers.{n}.mlp.weight": masters((6, 10), n) for n in (0, 1)}
    truth[f"{STATE}.embedding.weight"] = masters((300, 8), 2)
    stored = {name: split(master) for name, master in truth.items()}
    state: dict[str, Any] = {name: lower for name, (_, lower) in stored.items()}
    first, second, embedding = (weight for weight, _ in stored.values())
    state |= {"decoder.layers.mlp.weight": torch.stack([first, second])}
    state |= {"embedding.weight": embedding, "frozen": torch.ones(3, dtype=torch.int16)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return truth


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_masters_are_joined_bit_for_bit_in_whatever_type(dtype: str | None, tmp_path: Path) -> None:
    truth = written(tmp_path / "c")
    casts = Casts(BY_NAME[dtype]) if dtype else None
    options = {"select": [f"{STATE}.*"], "dequantize": True, "casts": casts}
    convert_to("safetensors", tmp_path / "c", tmp_path / "m", **options)
    (file,) = (tmp_path / "m").glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name].view(torch.int32), truth[name].view(torch.int32))
               for name in truth)  # fmt: skip


def test_weights_stay_beside_their_masters(tmp_path: Path) -> None:
    truth = written(tmp_path / "c")
    convert_to("torch-save", tmp_path / "c", tmp_path / "m.pt", dequantize=True)
    found = torch.load(tmp_path / "m.pt")
    assert torch.equal(found["embedding.weight"], split(truth[f"{STATE}.embedding.weight"])[0])
    assert torch.equal(found["frozen"], torch.ones(3, dtype=torch.int16))


@pytest.mark.parametrize("weights", [{}, {"w": torch.float32}, dict.fromkeys(("w", "model.w"), 0)])
def test_remainders_without_one_weight_of_bf16_are_refused(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    _, lower = split(masters((6, 10), 0))
    state = {
        name: torch.ones(6, 10, dtype=kind or torch.bfloat16) for name, kind in weights.items()
    }
    dcp.save({f"{STATE}.w": lower, **state}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(Unsupported, match="int16 without scales, which --dequantize does not"):
        convert_to("torch-save", tmp_path / "c", tmp_path / "m.pt", dequantize=True)
