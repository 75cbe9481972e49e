"""Folders of model-parallel ranks that are lost, swapped, or from another save."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Damaged
from ckptool.formats.megatron.model import (
    Arguments,
)
from ckptool.formats.megatron.rank_folders import _require_all, _require_own

Copy = Callable[[str], Path]


def test_the_tracker_says_which_checkpoint_of_a_run_is_meant(copy_of: Copy) -> None:
    run = copy_of("megatron_torch")
    shutil.copytree(run / "iter_0000100", run / "iter_0000200")
    assert open_checkpoint(run).path == run / "iter_0000100"
    (run / "latest_checkpointed_iteration.txt").write_text("200\n")
    assert open_checkpoint(run).path == run / "iter_0000200"
    (run / "latest_checkpointed_iteration.txt").write_text("300")
    with pytest.raises(Damaged, match="no iter_0000300"):
        open_checkpoint(run)


def test_a_rank_without_its_folder(copy_of: Copy) -> None:
    run = copy_of("megatron_torch")
    shutil.rmtree(run / "iter_0000100" / "mp_rank_01")
    with pytest.raises(Damaged, match=r"TP rank 1, PP rank 0, EP rank 0 is missing \(1 of 2 x 1"):
        open_checkpoint(run)


def test_a_folder_of_a_rank_there_is_none_of(copy_of: Copy) -> None:
    run = copy_of("megatron_torch") / "iter_0000100"
    shutil.copytree(run / "mp_rank_01", run / "mp_rank_02")
    with pytest.raises(Damaged, match=r"mp_rank_02/.* belongs to no rank of TP 2 x PP 1 x EP 1"):
        open_checkpoint(run)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("megatron_torch", "mp_rank_00", "mp_rank_01"),
        ("megatron_torch_distributed", "mp_rank_00_000", "mp_rank_00_001"),
    ],
)
def test_folders_that_took_each_others_place(
    name: str, one: str, other: str, copy_of: Copy
) -> None:
    run = copy_of(name) / "iter_0000100"
    for old, new in ((one, "between"), (other, one), ("between", other)):
        (run / old).rename(run / new)
    with pytest.raises(Damaged, match=f"{one}/.* written by rank 1, {other}/.* by rank 0"):
        open_checkpoint(run)


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_neighbors_alone_tell_folders_that_took_each_others_place(
    writers: list[int], lacking: set[int]
) -> None:
    """As every pair of folders that differ in one of the three would."""
    places = [place for at, place in enumerate(product(range(2), range(3), range(2)))
              if at not in lacking]  # fmt: skip
    known = dict(zip(places, writers, strict=False))
    wrong = any(
        sum(map(operator.ne, one, other)) == 1 and one < other and known[one] > known[other]
        for one, other in product(known, known)
    )
    try:
        _require_own({rank: str(rank) for rank in known}, {str(r): n for r, n in known.items()})
    except Damaged:
        assert wrong
    else:
        assert not wrong


def test_thousands_of_folders_are_compared_at_once() -> None:
    places = list(product(range(8), range(64), range(64)))
    ranks = {rank: str(rank) for rank in places}
    _require_own(ranks, {str(rank): number for number, rank in enumerate(places)})
    stated = Arguments({"tensor_model_parallel_size": 1 << 30})
    with pytest.raises(Damaged, match=r"TP rank 8, PP rank 0, EP rank 0 is missing"):
        _require_all(ranks, stated)


def test_a_file_that_no_rank_has(copy_of: Copy) -> None:
    run = copy_of("megatron_torch_distributed") / "iter_0000100"
    shutil.copy(run / "mp_rank_00_000" / "distrib_optim.pt", run / "distrib_optim.pt")
    assert "file-unused" in {one.code for one in verify(run, VerifyOptions()).findings}
