"""What a folder has and the system does not show is named, and never left out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Changed, NotFound, Problem
from ckptool.storage.file_status import DEPTH
from ckptool.storage.local import LocalSource


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two safetensors files of one model, which no index names."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (1, 2):
        file = folder / f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": np.arange(4.0)}, file)
    return folder


class _Entry:
    """An entry of a folder whose ``stat`` fails, or that cannot even be told a folder or file."""

    def __init__(self, entry: os.DirEntry[str], number: int, method: str) -> None:
        self._entry, self._number, self._method = entry, number, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            return self._fail
        return getattr(self._entry, name)

    def _fail(self) -> None:
        raise OSError(self._number, os.strerror(self._number), self._entry.path)


def fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int, method: str = "stat") -> None:
    """Let a call fail for each entry of a name, or listing the folder of that name."""
    real = os.scandir

    @contextmanager
    def scandir(path: Any) -> Iterator[Iterator[Any]]:
        if method == "scandir" and Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        with real(path) as entries:
            yield (
                _Entry(entry, number, method) if entry.name == name else entry for entry in entries
            )

    monkeypatch.setattr(os, "scandir", scandir)


LAST = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("method", ["stat", "is_dir", "is_file"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_looked_at_ends_the_command(
    number: int, method: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, LAST, number, method)
    command = ["convert", str(shards), str(tmp_path / "m.pt"), "--to", "torch-save"]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, NotFound)
    assert f"{LAST}: cannot be read: {os.strerror(number)}" in str(error)
    assert not (tmp_path / "m.pt").exists()
    found = verify(shards, VerifyOptions())
    assert [(f.code, f.file) for f in found.findings if f.code == "file-unreadable"] == [
        ("file-unreadable", LAST)
    ]
    assert not found.ok


def test_a_file_that_vanishes_while_it_is_listed(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, LAST, errno.ENOENT)
    with pytest.raises(Changed, match=LAST) as raised:
        open_checkpoint(shards)
    assert raised.value.exit_code == 5
    assert "file-changed" in {f.code for f in verify(shards, VerifyOptions()).findings}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_subfolder_that_cannot_be_listed(
    number: int, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shards / "more").mkdir()
    fail(monkeypatch, "more", number, "scandir")
    with pytest.raises(NotFound, match="more: cannot be read"):
        open_checkpoint(shards)
    assert not verify(shards, VerifyOptions()).ok


@pytest.mark.parametrize("name", [".git", ".cache", "lost+found"])
def test_what_cannot_belong_to_a_checkpoint_stops_nothing(
    name: str, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shards / name).mkdir()
    fail(monkeypatch, name, errno.EACCES, "scandir")
    assert set(open_checkpoint(shards).catalog.tensors) == {"w1", "w2"}
    assert verify(shards, VerifyOptions()).ok


@pytest.mark.parametrize("target", ["../blobs/1", LAST])
def test_data_behind_a_link_to_nothing(target: str, shards: Path) -> None:
    (shards / LAST).unlink()
    (shards / LAST).symlink_to(target)
    with pytest.raises(NotFound, match=f"{LAST}: a link to nothing"):
        open_checkpoint(shards)
    assert ("file-missing", LAST) in {
        (f.code, f.file) for f in verify(shards, VerifyOptions()).findings
    }


def test_another_link_to_nothing_is_named(shards: Path) -> None:
    (shards / "latest-run").symlink_to("nowhere")
    notes = open_checkpoint(shards).catalog.notes
    assert "latest-run" in [note.file for note in notes if isinstance(note, Problem)]
    assert verify(shards, VerifyOptions()).ok


def test_a_subfolder_has_what_could_not_be_listed_in_it(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, LAST, errno.EIO)
    source = LocalSource.folder(shards.parent)
    for inner in (source.narrowed("shards"), source.subfolders()["shards"]):
        assert list(inner.unlisted) == [LAST]


def test_a_folder_with_nothing_else_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    fail(monkeypatch, "step-1", errno.EACCES, "scandir")
    with pytest.raises(NotFound, match="step-1"):
        open_checkpoint(tmp_path / "run")


def test_data_many_folders_deep_is_read(shards: Path) -> None:
    below = shards.joinpath(*"abcdefghijkl")
    below.mkdir(parents=True)
    (shards / LAST).rename(below / LAST)
    name = str((below / LAST).relative_to(shards))
    assert name in LocalSource.folder(shards).files
    assert name in {finding.file for finding in verify(shards, VerifyOptions()).findings}


def test_a_folder_that_lies_too_deep_is_named(shards: Path) -> None:
    deepest = shards.joinpath(*["a"] * (DEPTH + 1))
    deepest.mkdir(parents=True)
    (deepest / "model.safetensors").touch()
    name = str(deepest.relative_to(shards))
    with pytest.raises(NotFound, match=f"{name}: not looked into"):
        open_checkpoint(shards)
    report = verify(shards, VerifyOptions())
    assert ("file-unreadable", name) in {(f.code, f.file) for f in report.findings}
    assert not report.ok
