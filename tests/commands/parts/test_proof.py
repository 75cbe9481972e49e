"""Each part proves what it wrote, and checks its share of the source's checksums."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from parts.part_runs import asked, content, finish, refused, reshard, write

from ckptool.commands.open import open_checkpoint
from ckptool.core.catalog import Container
from ckptool.engine.write import disk_target
from ckptool.engine.write.run import run
from ckptool.errors import (
    Changed,
    Damaged,
    NotVerified,
)


def test_each_part_proves_what_it_wrote(
    three: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    before, real = content(tmp_path), run

    def damaging(work: Any, folder: Path, *words: Any) -> None:
        real(work, folder, *words)
        names = [work.plan.layout.files[number].path for number in work.numbers]
        path = next(folder / name for name in names if name.endswith(".safetensors"))
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(disk_target, "run", damaging)
        refused(lambda: write(planned, source, target, "2/3"), "tensors? differ", NotVerified)
    assert content(tmp_path) == before, "the other parts stay"
    refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")


def test_a_part_without_proof_is_committed_only_so(three: Any, source: Path) -> None:
    planned, target = three
    planned(source, target, asked("2/3", verify=False)).run()
    said = refused(lambda: finish(planned, source, target), "part 2 of 3 is not verified")
    assert "--no-verify" in said
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def test_each_checksum_of_the_source_is_one_part_s(source: Path, tmp_path: Path) -> None:
    """Also of records that several parts need, and none reads whole."""
    mine, target = tmp_path / "ckpt", tmp_path / "m"
    shutil.copytree(source, mine)
    file = next(mine.glob("*.distcp"))
    data = file.read_bytes()
    at = open_checkpoint(mine).catalog.tensors["layers.0.w"].chunks[0].at
    assert isinstance(at, Container)
    changed = bytearray(data)
    changed[at.offset + at.nbytes // 2] ^= 1
    file.write_bytes(changed)
    found = 0
    for part in ("1/4", "2/4", "3/4", "4/4"):
        try:
            write(reshard("4"), mine, target, part)
        except Damaged as error:
            found += "CRC-32" in error.message
    assert found


def test_a_source_that_changes_meanwhile_ends_only_this_part(
    three: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptool.commands.transfer import transfer as module

    planned, target = three
    before = content(tmp_path)

    def changed(*words: Any) -> None:
        raise Changed("the source changed")

    monkeypatch.setattr(module, "require_unchanged", changed)
    refused(lambda: write(planned, source, target, "2/3"), "the source changed", Changed)
    assert content(tmp_path) == before
