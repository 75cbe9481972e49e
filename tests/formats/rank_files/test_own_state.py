"""What each rank has for itself is no replica: random states, and its place in the data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool


def own_state(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    return {
        "global_step": 100,
        "rng": {
            "python": random.Random(rank).getstate(),
            "torch": generator.get_state(),
            "cuda": [generator.get_state()[:16].clone()],
        },
        "torch_random_state": generator.get_state(),
        "generator": generator.get_state(),
        "train_loader_state": {"order": torch.randperm(9, generator=generator), "epoch": rank},
    }


def codes(folder: Path) -> set[str]:
    return {each.code for each in ckptool.verify(folder).findings}


@pytest.mark.parametrize("has_sums", [True, False])
def test_state_of_each_rank_may_differ(has_sums: bool, tmp_path: Path) -> None:
    for rank in range(3):
        file = tmp_path / f"rank{rank}.pt"
        torch.save(own_state(rank), file, _use_new_zipfile_serialization=has_sums)
    assert codes(tmp_path) <= {"no-checksum"}
    kept = ckptool.open(tmp_path)
    for rank in range(3):
        order = own_state(rank)["train_loader_state"]["order"]
        assert torch.equal(kept.read(f"train_loader_state.order@rank{rank}"), order)
        assert torch.equal(kept.read(f"generator@rank{rank}"), own_state(rank)["generator"])


@pytest.mark.parametrize(
    "name",
    ["rng_dp_rank_{}.pt", "data_loader_rank{}.pt", "rng/rank{}.pt", "train_sampler_rank{}.pt"],
)
def test_a_name_says_that_all_in_a_file_is_of_a_rank(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        file = tmp_path / name.format(rank)
        file.parent.mkdir(exist_ok=True)
        torch.save({"place": torch.tensor([rank, 7])}, file)
    assert codes(file.parent) == set()


@pytest.mark.parametrize(
    "name", ["random-baseline/rank{}.pt", "dataset_v2/rank_{}.pt", "random_lm_rank{}.pt"]
)
def test_the_name_of_a_training_says_nothing_of_its_files(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        file = tmp_path / name.format(rank)
        file.parent.mkdir(exist_ok=True)
        torch.save({"proj.weight": torch.full((2, 2), float(rank))}, file)
    assert codes(file.parent) == {"replicas-differ"}


def test_such_state_beside_a_model_is_none_of_it(tmp_path: Path) -> None:
    (source := tmp_path / "own").mkdir()
    for rank in range(2):
        torch.save(own_state(rank) | {"w": torch.ones(2, 2)}, source / f"rank{rank}.pt")
    ckptool.convert(source, tmp_path / "hf", to="hf", model_only=True)
    assert set(load_file(tmp_path / "hf/model.safetensors")) == {"w"}


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"generator": torch.ones(2)}},
        {"sampler": {"conv.weight": torch.ones(2)}},
        {"optimizer": {"state": {"loader": {"exp_avg": torch.ones(2)}}}},
        {"train_state": torch.ones(2)},
    ],
)
def test_what_is_of_a_model_or_an_optimizer_is_a_replica(
    state: dict[str, Any], tmp_path: Path
) -> None:
    def shifted(value: Any, rank: int) -> Any:
        if isinstance(value, dict):
            return {key: shifted(each, rank) for key, each in value.items()}
        return value + rank

    for rank in range(2):
        torch.save(shifted(state, rank), tmp_path / f"rank{rank}.pt")
    assert "replicas-differ" in codes(tmp_path)


def test_positions_in_the_data_are_no_steps(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"data_loader": {"step": rank}, "w": torch.ones(2)}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    assert codes(tmp_path) == set()
    for rank in range(2):
        torch.save({"step": rank, "w": torch.ones(2)}, tmp_path / f"rank{rank}.pt")
    assert codes(tmp_path) == {"steps-differ"}
