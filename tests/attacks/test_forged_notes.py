"""Notes that another put beside a target, in a folder that was downloaded or that is shared."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, TransferOptions
from ckptool.commands.runs.prune.prune import prune
from ckptool.engine.write.removal import clear, leftovers
from ckptool.errors import TransferError, Unsupported
from ckptool.storage import note as note_module
from ckptool.storage.commit_note import CommitNote, NoteFile, targets_with_notes

NOBODY = 65534
JOURNAL = {"schema": "ckptool.journal/1", "plan": "p", "source": "s"}
COMMIT = {
    "schema": "ckptool.commit/3", "plan": "p", "source": "s", "folder": True, "new": None,
    "old": None, "own": {}, "names": {},
}  # fmt: skip
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim" / "thesis.txt"
    path.parent.mkdir()
    path.write_text("precious")
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a checkpoint, such as a download."""
    path = tmp_path / "place"
    path.mkdir()
    torch.save({"w": torch.ones(8)}, path / "m.pt")
    return path


def convert(place: Path, name: str = "m.safetensors", to: str = "safetensors", **more: Any) -> Any:
    transfer = TransferOptions(run=RunOptions(workers=1), **more)
    return prepare(place / "m.pt", place / name, ConvertOptions(to, transfer=transfer)).run()


def stamp(path: Path) -> list[int]:
    status = path.lstat()
    return [status.st_size, status.st_mtime_ns]


@pytest.mark.parametrize("name", ["../../victim/thesis.txt", "absolute", "link/thesis.txt"])
@pytest.mark.parametrize("more", [{}, {"resume": True}], ids=str)
def test_a_journal_names_no_file_elsewhere(
    name: str, more: dict[str, Any], place: Path, victim: Path
) -> None:
    staged = place / ".m.safetensors.partial"
    staged.mkdir()
    if name.startswith("link"):
        (staged / "link").symlink_to(victim.parent)
    files = {str(victim) if name == "absolute" else name: 10**12}
    journal = place / f"{staged.name}.journal.0"
    journal.write_text(json.dumps(JOURNAL | {"files": files}) + "\n")
    with pytest.raises(Unsupported) as caught:
        convert(place, **more)
    assert staged.name in caught.value.message
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("to_prune", [True, False])
def test_a_commit_removes_no_file_elsewhere(to_prune: bool, place: Path, victim: Path) -> None:
    for number in (1, 2):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=place / f"step-{number}", no_dist=True)
    name = "step-9" if to_prune else "m.safetensors"
    (place / f".{name}.replaced").mkdir()
    note = place / f".{name}.partial.journal.commit"
    note.write_text(json.dumps(COMMIT | {"own": {str(victim): stamp(victim)}}))
    with pytest.raises(Unsupported, match=r"commit: is not as ckptool writes it"):
        prune(place, PruneOptions(keep_last=1, yes=True)) if to_prune else convert(place)
    assert victim.read_text() == "precious"


@root_only
@pytest.mark.parametrize("kind", ["journal", "commit", "folder", "aside", "part of a note"])
def test_what_another_user_put_there_is_neither_followed_nor_removed(
    kind: str, place: Path
) -> None:
    """In a folder such as /tmp; the error names the path and what to do."""
    place.chmod(0o1777)
    staged, note = place / ".out.partial", place / ".out.partial.journal.commit"
    put: dict[str, Callable[[], Path]] = {
        "journal": lambda: _write(place / ".out.partial.journal.0", JOURNAL),
        "commit": lambda: _write(note, COMMIT | {"new": 1}),
        "folder": lambda: _mkdir(staged),
        "aside": lambda: _mkdir(place / ".out.replaced"),
        "part of a note": lambda: _write(note.with_name(f"{note.name}.new"), COMMIT),
    }
    if kind == "folder":
        _write(place / ".out.partial.journal.0", JOURNAL)
    path = put[kind]()
    os.chown(path, NOBODY, NOBODY)
    before = _state(path)
    for more in ({}, {"overwrite": True}):
        with pytest.raises(Unsupported) as caught:
            convert(place, "out", "dcp", **more)
        assert str(path) in caught.value.message
        assert str(path) in str(caught.value.hint)
        assert _state(path) == before


def _state(path: Path) -> tuple[int, ...]:
    """What changes if a path is replaced or written; reading a folder sets its time of access."""
    status = path.lstat()
    return status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_ctime_ns


def _write(path: Path, value: dict[str, Any]) -> Path:
    path.write_text(json.dumps(value) + "\n")
    return path


def _mkdir(path: Path) -> Path:
    path.mkdir()
    (path / "thesis.txt").write_text("precious")
    return path


@root_only
def test_the_leftover_of_anothers_removal_stays(place: Path) -> None:
    left = _mkdir(place / ".step-1.ckptool-removed")
    os.chown(left, NOBODY, NOBODY)
    with pytest.raises(Unsupported, match="belongs to another user"):
        clear(next(iter(leftovers(place))))
    assert (left / "thesis.txt").exists()


def test_a_disk_that_is_mounted_in_a_step_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = _mkdir(place / ".step-1.ckptool-removed")
    (left / "mounted").mkdir()
    real = os.lstat

    def lstat(path: Any, **more: Any) -> Any:
        status = real(path, **more)
        if os.fspath(path).endswith("mounted"):
            return os.stat_result((*status[:2], status.st_dev + 1, *status[3:]))
        return status

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(TransferError, match="another file system is mounted at"):
        clear(left)
    assert (left / "thesis.txt").exists()


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_ones_own_notes_are_followed_whatever_the_umask(
    mask: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptool.engine.write.journal import Journal

    def stop(*words: Any) -> None:
        raise KeyboardInterrupt

    before = os.umask(mask)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "done", stop)
            with pytest.raises(KeyboardInterrupt):
                convert(place)
        notes = list(place.glob(".*.journal.*"))
        assert len(notes) == 1
        assert not any(note.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) for note in notes)
        convert(place, resume=True)
    finally:
        os.umask(before)
    assert sorted(os.listdir(place)) == ["m.pt", "m.safetensors"]
    mode = (place / "m.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == 0o666 & ~mask


def test_a_file_system_that_knows_one_owner_and_mode_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network shares do: what such a disk says of a note, it says of every file."""
    path = _write(place / ".out.partial.journal.0", JOURNAL)
    path.chmod(0o777)
    with pytest.raises(Unsupported, match=r"others may write to it \(mode 777\)") as caught:
        note_module.read_note(path)
    assert f"chmod go-w {path}" in str(caught.value.hint)
    usual = path.stat().st_uid, 0o777
    monkeypatch.setattr(note_module, "_usual_access", lambda folder: usual)
    assert note_module.read_note(path)


def test_a_pair_is_read_by_no_note_of_a_link(place: Path, victim: Path) -> None:
    """The staging folder is a link: what is behind it is not read as the side file."""
    torch.save({"w": torch.ones(2), "step": 3}, place / "m.pt")
    convert(place)
    (victim.parent / "m.extra.pt").write_bytes(b"another's")
    (place / ".m.safetensors.partial").symlink_to(victim.parent)
    main = place / "m.safetensors"
    note = COMMIT | {"folder": False, "new": main.lstat().st_ino}
    note |= {"names": {"m.safetensors": stamp(main), "m.extra.pt": [1, 1]}}
    _write(place / ".m.safetensors.partial.journal.commit", note)
    source = open_checkpoint(main).source
    assert source.read("m.extra.pt", 0, source.files["m.extra.pt"]) != b"another's"


def test_only_names_beside_which_a_note_can_lie_are_finished(place: Path) -> None:
    for name in ("", ".", "..", "a"):
        (place / f".{name}.partial.journal.commit").touch()
    assert targets_with_notes(place) == [place / "a"]


def test_a_name_that_is_no_text_comes_back_as_it_was(place: Path) -> None:
    name = os.fsdecode(b"\xff\xfe/w")
    file = NoteFile(place / "out", fsync=False)
    note = CommitNote("p", "s", True, 1, 2, {name: (3, -4)}, {name: (5, 6)})
    file.write(note)
    assert file.read() == note
