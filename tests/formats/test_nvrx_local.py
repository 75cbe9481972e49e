"""Local checkpoints: whichever copy of a rank's file is whole is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import case, convert_to, read_back

from ckptool.commands.open import open_checkpoint
from ckptool.errors import Damaged

Copy = Callable[[str], Path]
FIRST, SECOND = "iter_0000100_0_local.pt", "iter_0000100_1_local.pt"


def same_as_truth(folder: Path, out: Path) -> bool:
    convert_to("safetensors", folder, out / "model")
    return read_back("safetensors", out / "model") == case("megatron_local").truth


def test_an_unfinished_iteration_is_passed_over(copy_of: Copy, out: Path) -> None:
    folder = copy_of("megatron_local")
    shutil.copy(folder / "0" / FIRST, folder / "0" / "iter_0000110_0_local.pt")
    shutil.copy(folder / "1" / SECOND, folder / "1" / "iter_0000110_1_local.dirty.pt")
    catalog = open_checkpoint(folder).catalog
    assert catalog.objects["iteration"].value == 100
    assert "lacks the file of rank 1 (unfinished); iteration 100 is read" in catalog.notes[0]
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
