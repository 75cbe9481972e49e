"""Several ranks load onto meshes: every shard equals torch's own cut of the truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, on_ranks
from safetensors.torch import save_file

WORKERS = Path(__file__).with_name("load_workers.py")

SOURCES = ("dcp_fsdp2_tp", "deepspeed_zero_3", "hf_sharded", "megatron_torch", "rank_verl")
MESHES: dict[int, dict[str, list[int | None]]] = {
    2: {"2": [0]},
    4: {"4": [0], "2x2": [0, 1], "1x4": [None, 1]},
    8: {"2x4": [None, 0], "2x2x2": [0, 0, 1]},
}
"""By the number of ranks: meshes, with the tensor dim that each mesh dim cuts, or none."""
EVERY_FORMAT = "2x2"
"""The mesh of all formats: what a rank asks for is the same of each."""


def uneven() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(9, 2, generator=generator),
        "cube": torch.randn(5, 7, 6, generator=generator).to(torch.bfloat16),
        "short": torch.arange(3),
        "none": torch.empty(0, 4),
        "seen": torch.tensor(3),
        "mask": torch.arange(11) % 3 == 0,
    }


@pytest.mark.parametrize("world", MESHES)
def test_every_rank_gets_its_own_boxes(world: int, tmp_path: Path) -> None:
    for name, state in (("uneven", uneven()), ("network", network())):
        (tmp_path / name).mkdir()
        torch.save(state, tmp_path / name / "model.pt")
    save_file(uneven(), tmp_path / "uneven" / "truth.safetensors")
    own = {str(tmp_path / "uneven" / "model.pt"): str(tmp_path / "uneven" / "truth.safetensors")}
    loads = [
        (shape, cut, own | (formats() if shape == EVERY_FORMAT else {}))
        for shape, cut in MESHES[world].items()
    ]
    ended = on_ranks(world, [WORKERS, tmp_path, json.dumps(loads)], fresh=world == 2)
    assert [one.code for one in ended] == [0] * world, ended[0].stderr
    for rank in range(world):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert len(found) == 2 * (sum(len(sources) for _, _, sources in loads) + 2)
        assert not {name: wrong for name, wrong in found.items() if wrong}


def formats() -> dict[str, str]:
    """A checkpoint of each of some formats, and its truth."""
    folders = [FIXTURES / name for name in SOURCES]
    return {str(one / "ckpt"): str(one / "truth.safetensors") for one in folders}


def network() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"up.weight": (13, 9), "up.bias": (13,), "down.weight": (7, 13), "down.bias": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
