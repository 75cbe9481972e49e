"""Local checkpoints: any complete copy of a rank's file is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import case, convert_to, read_back

from ckptool.commands.open import open_checkpoint
from ckptool.core.box import Box
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged
from ckptool.formats.megatron.local import ShardRecord, join_parts

Copy = Callable[[str], Path]
FIRST, SECOND = "iter_0000100_0_local.pt", "iter_0000100_1_local.pt"


def same_as_truth(folder: Path, out: Path) -> bool:
    convert_to("safetensors", folder, out / "model")
    return read_back("safetensors", out / "model") == case("megatron_local").truth


def test_an_unfinished_iteration_is_skipped(copy_of: Copy, out: Path) -> None:
    folder = copy_of("megatron_local")
    shutil.copy(folder / "0" / FIRST, folder / "0" / "iter_0000110_0_local.pt")
    shutil.copy(folder / "1" / SECOND, folder / "1" / "iter_0000110_1_local.dirty.pt")
    catalog = open_checkpoint(folder).catalog
    assert catalog.objects["iteration"].value == 100
    assert "lacks the file of rank 1 (unfinished); reading iteration 100" in catalog.notes[0]
    assert same_as_truth(folder, out)


def test_a_lost_rank_is_read_from_its_replica(copy_of: Copy, out: Path) -> None:
    folder = copy_of("megatron_local")
    shutil.move(folder / "1" / SECOND, folder / "0" / SECOND)
    catalog = open_checkpoint(folder).catalog
    assert any("rank 1 is read from its replica 0/" in note for note in catalog.notes)
    assert same_as_truth(folder, out)


def test_a_damaged_file_gives_way_to_its_replica(copy_of: Copy, out: Path) -> None:
    folder = copy_of("megatron_local")
    own = folder / "1" / SECOND
    shutil.copy(own, folder / "0" / SECOND)
    own.write_bytes(own.read_bytes()[:1000])
    assert any("not used" in note for note in open_checkpoint(folder).catalog.notes)
    assert same_as_truth(folder, out)


def test_a_rank_that_nothing_replaces(copy_of: Copy) -> None:
    folder = copy_of("megatron_local")
    shutil.rmtree(folder / "1")
    with pytest.raises(Damaged, match="iteration 100 lacks the file of rank 1"):
        open_checkpoint(folder)


def test_a_session_lies_below_the_folder_that_is_named(copy_of: Copy) -> None:
    folder = copy_of("megatron_local")
    shutil.move(folder, folder.parent / "session")
    (folder / "..").resolve().mkdir(exist_ok=True)
    assert open_checkpoint(folder.parent).path == folder.parent / "session"


def part(
    key: str, whole: tuple[int, ...], lo: tuple[int, ...], shape: tuple[int, ...]
) -> ShardRecord:
    return ShardRecord(key, BY_NAME["float32"], whole, Box.at(lo, shape), 1, None)


def test_tensors_that_are_one_in_the_model_lie_side_by_side() -> None:
    """The second rank's z and B of one of Mamba's layers; a gate and its up projection are one."""
    parts = [part("z", (3, 8, 5), (2, 4, 0), (1, 4, 5)), part("B", (3, 2, 5), (2, 1, 0), (1, 1, 5))]
    found = join_parts(parts)
    assert [one.whole for one in found] == [(3, 10, 5), (3, 10, 5)]
    assert [one.box.lo for one in found] == [(2, 4, 0), (2, 9, 0)]
    gated = [part("fc1", (3, 8, 5), (2, at, 0), (1, 2, 5)) for at in (2, 6)]
    assert join_parts(gated) == gated


def test_tensors_of_other_dims_are_not_joined() -> None:
    with pytest.raises(Damaged, match="cannot be joined"):
        join_parts([part("z", (3, 8, 5), (0, 0, 0), (1, 4, 5)), part("B", (3,), (0,), (1,))])
