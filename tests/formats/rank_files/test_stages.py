"""Rank files of pipeline stages: under names of the whole model, or of the stage alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import bits, convert_to, read_back
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Damaged

STAGES, RANKS = 2, 4


def value(name: str, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(rows, 4, generator=generator)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty folder for the ranks' files."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def save(folder: Path, whole: Any, *, plain: bool = False) -> None:
    """A file a rank; ``whole`` gives a stage's tensors, which its own device mesh cuts."""
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "tp"))["tp"]
            tensors = whole(rank // 2)
            if not plain:
                tensors = {
                    name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
                    for name, tensor in tensors.items()
                }
            torch.save({"model": tensors}, folder / f"model_rank{rank}.pt")
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("plain", [False, True], ids=["DTensors", "plain tensors"])
def test_names_of_the_whole_model(plain: bool, run: Path, out: Path) -> None:
    save(run, lambda stage: {f"layers.{stage}.w": value(f"{stage}")}, plain=plain)
    convert_to("safetensors", run, out / "model")
    wanted = {f"model.layers.{stage}.w": bits(value(f"{stage}")) for stage in range(STAGES)}
    assert read_back("safetensors", out / "model") == wanted


OWN_NAMES = {
    "other values": lambda stage: {"layers.0.w": value(f"{stage}")},
    "another shape": lambda stage: {"layers.0.w": value("w", 6 + 2 * stage)},
}


@pytest.mark.parametrize("whole", OWN_NAMES.values(), ids=OWN_NAMES)
def test_names_of_a_stage_are_refused(whole: Any, run: Path, out: Path) -> None:
    save(run, whole)
    with pytest.raises(Damaged, match="ranks 0, 1 and 2, 3 differ: pipeline stages") as caught:
        convert_to("safetensors", run, out / "model")
    assert "--per-rank" in (caught.value.hint or "")
    codes = [finding.code for finding in verify(run, VerifyOptions()).findings]
    assert codes == ["replicas-differ"]


@pytest.mark.parametrize("whole", OWN_NAMES.values(), ids=OWN_NAMES)
def test_names_of_a_stage_are_qualified(whole: Any, run: Path, out: Path) -> None:
    """By the first rank of the stage."""
    save(run, whole)
    convert_to("safetensors", run, out / "model", per_rank=True)
    wanted = {
        f"model.layers.0.w@rank{2 * stage}": bits(whole(stage)["layers.0.w"])
        for stage in range(STAGES)
    }
    assert read_back("safetensors", out / "model") == wanted


def test_replicas_that_agree_are_one(run: Path) -> None:
    save(run, lambda stage: {"w": value("w")})
    catalog = open_checkpoint(run).catalog
    assert list(catalog.tensors) == ["model.w"]
    assert all(len(chunk.copies) == 1 for chunk in catalog.tensors["model.w"].chunks)
