"""Random states that Megatron's ranks save in their own files: all of them, or none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from verify.verify_runs import checked

from ckptool.commands.verify.checks.meaning.ranks import _FOLDER, _rank_of


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [
        (("00", "01"), []),
        ((), []),  # --no-save-rng
        (("00",), ["mp_rank_01"]),
        (("01",), ["mp_rank_00"]),
    ],
)
def test_random_states_of_a_megatron_rank_are_lost(
    ranks: tuple[str, ...], missing: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "iter_0000100"
    shutil.copytree(FIXTURES / "megatron_torch" / "ckpt" / path.name, path)
    for rank in ranks:
        file = path / f"mp_rank_{rank}" / "model_optim_rng.pt"
        states = {"torch_rng_state": torch.zeros(8, dtype=torch.uint8), "random_rng_state": (3,)}
        state = torch.load(file, weights_only=False) | {"rng_state": [states]}
        torch.save(state, file)
    found = [each for each in checked(path, quick=True).findings if each.code == "rank-missing"]
    text = "{0}/model_optim_rng.pt: without rng_state, which files of other ranks have"
    assert [each.message for each in found] == [text.format(name) for name in missing]


@pytest.mark.parametrize(
    ("folder", "depth", "rank"),
    [
        ("mp_rank_01", 2, "0 1"),
        ("mp_rank_01", 3, "0 1 0"),
        ("mp_rank_01_002", 2, "2 1"),
        ("mp_rank_01_002", 3, "0 1 2"),
        ("mp_rank_01_002_003", 3, "2 1 3"),
    ],
)
def test_the_numbers_of_a_folder(folder: str, depth: int, rank: str) -> None:
    match = _FOLDER.fullmatch(f"{folder}/model_optim_rng.pt")
    assert match
    assert " ".join(_rank_of(match, depth)) == rank
