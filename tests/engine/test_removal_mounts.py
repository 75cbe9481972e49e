"""Removal never goes through a mount, whatever file system begins there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.engine.write import removal
from ckptool.engine.write.removal import clear, mounted_in, remove
from ckptool.errors import TransferError

SPACED = "my data\t1"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "step-1"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "shard.pt").write_bytes(b"x")
    return path


@pytest.fixture(params=["inner", SPACED])
def bound(step: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of the same device that is bound into a step; names are escaped in mountinfo."""
    precious, inside = tmp_path / "precious", step / request.param
    precious.mkdir()
    inside.mkdir(exist_ok=True)
    (precious / "thesis").write_text("mine")
    done = subprocess.run(["mount", "--bind", precious, inside], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount")
    yield precious
    for path in (inside, step.with_name(f".{step.name}.ckptool-removed") / request.param):
        subprocess.run(["umount", path], capture_output=True)


def test_a_folder_that_is_bound_into_a_step_stays(bound: Path, step: Path) -> None:
    assert mounted_in(step) is not None
    assert mounted_in(step.parent) is not None
    with pytest.raises(TransferError, match="step-1: cannot be removed: another file system"):
        remove(step)
    assert (bound / "thesis").read_text() == "mine"
    assert step.exists()


def test_a_mount_in_what_a_removal_left_stays(bound: Path, step: Path) -> None:
    aside = step.with_name(f".{step.name}.ckptool-removed")
    step.rename(aside)
    with pytest.raises(TransferError, match="mounted"):
        clear(aside)
    assert (bound / "thesis").exists()


def test_another_device_is_seen_without_a_list_of_mounts(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        found = real(path)
        if os.fspath(path).endswith("inner"):
            return os.stat_result((*found[:2], found.st_dev + 1, *found[3:]))
        return found

    assert mounted_in(step) is None
    monkeypatch.setattr(removal, "_mount_points", list)
    monkeypatch.setattr(os, "lstat", lstat)
    assert mounted_in(step) == step / "inner"


def test_what_is_gone_has_no_mount(step: Path) -> None:
    assert mounted_in(step / "gone") is None


def test_a_link_to_a_mount_is_only_a_link(step: Path, tmp_path: Path) -> None:
    (step / "link").symlink_to("/proc")
    remove(step)
    assert not step.exists()
    assert os.path.exists("/proc/self")
