"""Numbers in names: a rank is a small number, and naming a large one costs nothing."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from ckptool.commands.open import open_checkpoint
from ckptool.errors import CkptoolError, Damaged
from ckptool.formats.dcp.metadata import parse
from ckptool.serialization.source import MOST_RANKS, find_missing_ranks


def test_the_first_missing_ranks() -> None:
    assert find_missing_ranks({0, 2, 5}, 7) == [1, 3, 4, 6]
    assert find_missing_ranks({1}, MOST_RANKS) == [0, *range(2, 13)]
    assert find_missing_ranks({0, 1}, 2) == []


@pytest.mark.parametrize(
    "names",
    [
        ("model_rank0.pt", f"model_rank{MOST_RANKS + 1}.pt"),
        ("model_rank0.pt", "model_rank999999999.pt"),
        ("model_world_size_999999999_rank_0.pt", "model_world_size_999999999_rank_1.pt"),
    ],
)
def test_a_rank_that_no_machine_has(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(Damaged, match="up to 1,048,576 ranks"):
        open_checkpoint(tmp_path)


def test_numbers_of_parts_are_no_saves(tmp_path: Path) -> None:
    for part in range(2):
        for rank in range(2):
            torch.save({f"w{part}": torch.ones(2)}, tmp_path / f"part_{part:05d}_rank{rank}.pt")
    assert len(open_checkpoint(tmp_path).catalog.tensors) == 2
    assert len(open_checkpoint(tmp_path / "part_00000_rank0.pt").catalog.files) == 4


@pytest.mark.parametrize(
    "name",
    [
        "__99999999999.metadata",
        "__999999999.metadata",
        "__999999999_0.distcp",
        "shard-00000-model-00001-of-00001.safetensors",
        "shard-999999999-model-00001-of-00001.safetensors",
    ],
)
def test_a_name_by_itself(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CkptoolError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "path", [("a",) * 101, (1 << 70,), (("a",),), (b"a",), ("\ud800",), (1.5,)], ids=repr
)
def test_a_path_of_what_no_path_is_made_of(path: tuple[object, ...]) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = Metadata({}, planner_data={"a": path}, storage_data={})
    with pytest.raises(Damaged, match="path"):
        parse(pickle.dumps(metadata), ".metadata")
