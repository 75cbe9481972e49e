"""Each step of a commit, each state that a kill leaves, and what is refused without touching it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from engine.write.trees import content, fill
from msgspec.structs import replace

from ckptool.engine.write import commit as module
from ckptool.engine.write.commit import FileCommit, FolderCommit, aside_of
from ckptool.engine.write.existing import stamps
from ckptool.errors import Committed, TransferError, Unsupported
from ckptool.storage import disk
from ckptool.storage.commit_note import OLD_SIDE, CommitNote, NoteFile

OLD = {"a.bin": b"old a", "sub/b.bin": b"old b"}
NEW = {"a.bin": b"new a!", "more/c.bin": b"new c", "index": b"new index"}
MINE = {"train.py": b"mine", "src/model.py": b"also mine"}


def note_of(target: Path, staged: Path, *, folder: bool, own: dict[str, bytes]) -> CommitNote:
    """The note of a commit that is about to begin; the last of ``NEW`` commits."""
    new = staged if folder else staged / target.name
    below = target if folder else target.parent
    return CommitNote(
        plan="plan",
        source="source",
        folder=folder,
        new=disk.identity(new) or 0,
        old=disk.identity(target),
        own=stamps(below, own),
        names=stamps(staged, content(staged)),
    )


# A folder


class Folders:
    """A target, an old checkpoint with files of others in it, and a new one that is staged."""

    def __init__(self, place: Path, *, old: bool = True) -> None:
        self.target, self.staged = place / "run", place / ".run.partial"
        self.aside = aside_of(self.target)
        if old:
            fill(self.target, OLD | MINE)
        fill(self.staged, NEW)
        self.file = NoteFile(self.target, fsync=True)
        self.note = note_of(self.target, self.staged, folder=True, own=OLD)

    @property
    def commit(self) -> FolderCommit:
        return FolderCommit(self.target, self.staged, self.file, fsync=True)

    @property
    def names(self) -> list[str]:
        """What is left beside the target."""
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot exchange two folders."""
    monkeypatch.setattr(module, "exchange", lambda first, second: False)


@pytest.fixture
def no_folder_moves(no_exchange: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot rename a folder either, as on a lower layer of an overlay."""

    def refuse(old: Path, new: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "rename", refuse)


def test_a_new_folder_is_renamed_into_place(tmp_path: Path) -> None:
    folders = Folders(tmp_path, old=False)
    commit = folders.commit
    assert not commit.is_done(folders.note)
    assert commit.replace(folders.note) is None
    assert commit.is_done(folders.note)
    commit.clear(folders.note)
    assert content(folders.target) == NEW
    assert folders.file.read() == folders.note, "it is its owner's to remove"
    assert folders.names == [folders.file.path.name, "run"]


def test_a_name_that_is_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    folders = Folders(tmp_path, old=False)
    fill(folders.target, MINE)
    with pytest.raises(FileExistsError):
        folders.commit.replace(folders.note)
    assert content(folders.target) == MINE
    assert content(folders.staged) == NEW


def test_an_old_folder_is_exchanged_and_files_of_others_move_into_the_new_one(
    folders: Folders,
) -> None:
    assert folders.commit.replace(folders.note) is None
    assert content(folders.target) == NEW
    assert content(folders.staged) == OLD | MINE
    folders.commit.clear(folders.note)
    assert content(folders.target) == NEW | MINE
    assert folders.names == [folders.file.path.name, "run"]


def test_what_replaces_something_has_its_mode(folders: Folders) -> None:
    folders.target.chmod(0o750)
    (folders.target / "a.bin").chmod(0o640)
    folders.commit.replace(folders.note)
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (folders.target, folders.target / "a.bin")
    ]
    assert modes == [0o750, 0o640]


@pytest.mark.usefixtures("no_exchange")
def test_without_an_exchange_the_old_folder_is_renamed_away_first(folders: Folders) -> None:
    remark = folders.commit.replace(folders.note)
    assert remark is not None
    assert "for a moment neither the old nor the new one was in place" in remark
    assert content(folders.aside) == OLD | MINE
    folders.commit.clear(folders.note)
    assert content(folders.target) == NEW | MINE
    assert folders.names == [folders.file.path.name, "run"]


@pytest.mark.usefixtures("no_exchange")
def test_what_has_the_name_of_the_old_folder_aside_is_in_the_way(folders: Folders) -> None:
    fill(folders.aside, MINE)
    with pytest.raises(Unsupported, match=r"\.run\.replaced: is in the way"):
        folders.commit.replace(folders.note)
    assert content(folders.target) == OLD | MINE


@pytest.mark.usefixtures("no_exchange")
def test_the_old_folder_is_put_back_if_the_new_one_cannot_be_renamed(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "rename_new", fail)
    with pytest.raises(OSError, match="Input/output error"):
        folders.commit.replace(folders.note)
    assert content(folders.target) == OLD | MINE
    assert content(folders.staged) == NEW


@pytest.mark.usefixtures("no_exchange")
def test_where_both_folders_are_is_said_if_neither_can_be_put_in_place(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come_between(source: Path, target: Path) -> None:
        fill(target, MINE)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(module, "rename_new", come_between)
    with pytest.raises(
        TransferError, match="neither the old nor the new one is in place"
    ) as caught:
        folders.commit.replace(folders.note)
    assert f"mv {folders.aside} {folders.target}" in (caught.value.hint or "")
    assert content(folders.aside) == OLD | MINE
    assert content(folders.staged) == NEW


@pytest.mark.usefixtures("no_folder_moves")
def test_a_folder_that_cannot_be_renamed_stays(folders: Folders) -> None:
    with pytest.raises(TransferError, match="is in a lower layer of an overlay") as caught:
        folders.commit.replace(folders.note)
    assert f"rm -r {folders.target}" in (caught.value.hint or "")
    assert content(folders.target) == OLD | MINE
    assert content(folders.staged) == NEW
    assert not folders.commit.roll(folders.note)


@pytest.mark.usefixtures("no_exchange")
def test_a_folder_that_may_not_be_renamed_stays(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(old: Path, new: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", deny)
    with pytest.raises(PermissionError):
        folders.commit.replace(folders.note)
    assert content(folders.target) == OLD | MINE


# A folder, after a kill


def begun(folders: Folders) -> None:
    """Nothing but the note is written."""


def renamed_away(folders: Folders) -> None:
    folders.target.rename(folders.aside)


def exchanged(folders: Folders) -> None:
    assert disk.exchange(folders.target, folders.staged)


def renamed_in_steps(folders: Folders) -> None:
    renamed_away(folders)
    folders.staged.rename(folders.target)


@pytest.mark.parametrize(
    ("kill", "is_new"),
    [(begun, False), (renamed_away, True), (exchanged, True), (renamed_in_steps, True)],
)
def test_a_killed_commit_of_a_folder_is_continued_or_was_not_begun(
    kill: Callable[[Folders], None], is_new: bool, folders: Folders
) -> None:
    kill(folders)
    assert folders.commit.roll(folders.note) is is_new
    assert folders.commit.is_done(folders.note) is is_new
    if is_new:
        folders.commit.clear(folders.note)
        assert content(folders.target) == NEW | MINE
        assert folders.names == ["run"]
    else:
        assert content(folders.target) == OLD | MINE
        assert content(folders.staged) == NEW


def test_a_target_that_is_gone_while_nothing_is_aside_is_not_continued(folders: Folders) -> None:
    folders.target.rename(folders.target.with_name("elsewhere"))
    assert not folders.commit.roll(folders.note)
    fill(folders.aside, OLD)
    assert not folders.commit.roll(folders.note), "this is another folder than the one noted"
    assert not folders.target.exists()


def test_folders_that_are_not_as_noted_are_described_and_stay(folders: Folders) -> None:
    """As in a copy of all, whose inode numbers are others."""
    unknown = replace(folders.note, new=1)
    fill(folders.aside, {"odd": b"odd"})
    with pytest.raises(Unsupported, match="nothing was moved or removed") as caught:
        folders.commit.roll(unknown)
    for words in (
        f"{folders.target} has the files of the old one",
        f"{folders.staged} has the files of the new one",
        f"{folders.aside} holds odd",
    ):
        assert words in caught.value.message
    assert f"rm {folders.file.path}" in (caught.value.hint or "")
    assert content(folders.staged) == NEW


def test_what_is_no_folder_or_is_not_there_is_called_that(folders: Folders) -> None:
    folders.target.rename(folders.aside)
    folders.target.symlink_to("elsewhere")
    folders.staged.rename(folders.staged.with_name("away"))
    with pytest.raises(Unsupported) as caught:
        folders.commit.roll(folders.note)
    assert f"{folders.target} is something else" in caught.value.message
    assert f"{folders.staged} is not there" in caught.value.message


# What is left of an old folder


@pytest.fixture
def replaced(folders: Folders) -> Folders:
    """The new one is in place, the old one where it was staged."""
    folders.commit.replace(folders.note)
    return folders


def test_another_folder_in_the_place_of_the_old_one_stays(replaced: Folders) -> None:
    replaced.staged.rename(replaced.staged.with_name("away"))
    fill(replaced.staged, MINE)
    with pytest.raises(Committed, match="is not the old one that was recorded") as caught:
        replaced.commit.clear(replaced.note)
    assert f"mv {replaced.staged} ELSEWHERE" in (caught.value.hint or "")
    assert content(replaced.staged) == MINE


def test_a_file_of_the_old_one_that_changed_since_stays_with_all_others(replaced: Folders) -> None:
    (replaced.staged / "a.bin").write_bytes(b"changed since")
    with pytest.raises(Committed, match=r"a\.bin, which changed since, is still in"):
        replaced.commit.clear(replaced.note)
    assert content(replaced.staged) == OLD | MINE | {"a.bin": b"changed since"}


def test_a_file_of_others_whose_name_the_new_one_has_stays(replaced: Folders) -> None:
    fill(replaced.staged, {"index": b"mine"})
    with pytest.raises(Committed, match="cannot be kept in it: the name is taken"):
        replaced.commit.clear(replaced.note)
    assert content(replaced.staged)["index"] == b"mine"
    assert content(replaced.target)["index"] == NEW["index"]


# A file


class Files:
    """A file and its side file at a target, and new ones that are staged."""

    def __init__(self, place: Path, *, old_side: bool = True, new_side: bool = True) -> None:
        self.target, self.side = place / "m.safetensors", place / "m.extra.pt"
        self.staged = place / ".m.safetensors.partial"
        fill(place, {"m.safetensors": b"old"} | ({"m.extra.pt": b"old side"} if old_side else {}))
        side = {"m.extra.pt": b"new side"} if new_side else {}
        fill(self.staged, side | {"m.safetensors": b"new one"})
        self.file = NoteFile(self.target, fsync=False)
        own = {"m.safetensors": b"", "m.extra.pt": b""}
        self.note = note_of(self.target, self.staged, folder=False, own=own)

    def commit(self, *, overwrite: bool = True) -> FileCommit:
        return FileCommit(self.target, self.staged, self.file, overwrite=overwrite)

    @property
    def content(self) -> dict[str, bytes]:
        """All but the note."""
        found = content(self.target.parent)
        found.pop(self.file.path.name, None)
        return found


BEFORE = {
    "m.safetensors": b"old",
    "m.extra.pt": b"old side",
    ".m.safetensors.partial/m.safetensors": b"new one",
    ".m.safetensors.partial/m.extra.pt": b"new side",
}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_file_and_its_side_file_replace_others(files: Files) -> None:
    commit = files.commit()
    assert not commit.is_done(files.note)
    assert commit.replace(files.note) is None
    assert commit.is_done(files.note)
    assert not files.side.exists(), "one of each is never there together"
    commit.clear(files.note)
    commit.clear(files.note)
    assert files.content == {"m.safetensors": b"new one", "m.extra.pt": b"new side"}
    assert not files.staged.exists()


def test_a_side_file_goes_with_the_file_that_had_one(tmp_path: Path) -> None:
    files = Files(tmp_path, new_side=False)
    files.commit().replace(files.note)
    files.commit().clear(files.note)
    assert files.content == {"m.safetensors": b"new one"}


def test_a_side_file_comes_to_a_file_that_had_none(tmp_path: Path) -> None:
    files = Files(tmp_path, old_side=False)
    files.commit().replace(files.note)
    files.commit().clear(files.note)
    assert files.content == {"m.safetensors": b"new one", "m.extra.pt": b"new side"}


def test_a_file_of_another_format_has_no_side_file(tmp_path: Path) -> None:
    target = tmp_path / "m.pt"
    staged = fill(tmp_path / ".m.pt.partial", {"m.pt": b"new"})
    note = note_of(target, staged, folder=False, own={})
    commit = FileCommit(target, staged, NoteFile(target, fsync=False), overwrite=False)
    commit.replace(note)
    commit.clear(note)
    assert target.read_bytes() == b"new"
    assert not staged.exists()


def test_without_overwriting_a_file_is_not_replaced(files: Files) -> None:
    with pytest.raises(FileExistsError):
        files.commit(overwrite=False).replace(files.note)
    assert files.content == BEFORE


def test_a_new_file_has_the_mode_of_the_old_one(files: Files) -> None:
    files.target.chmod(0o640)
    files.commit().replace(files.note)
    assert stat.S_IMODE(files.target.stat().st_mode) == 0o640


# A file, after a kill


def put_side_away(files: Files) -> None:
    files.side.rename(files.staged / OLD_SIDE)


def put_main(files: Files) -> None:
    put_side_away(files)
    (files.staged / files.target.name).replace(files.target)


def put_side(files: Files) -> None:
    put_main(files)
    (files.staged / files.side.name).rename(files.side)


def remove_old_side(files: Files) -> None:
    put_side(files)
    (files.staged / OLD_SIDE).unlink()


@pytest.mark.parametrize("kill", [put_main, put_side, remove_old_side])
def test_a_killed_commit_of_a_file_is_finished_once_the_main_file_is_there(
    kill: Callable[[Files], None], files: Files
) -> None:
    kill(files)
    assert files.commit().roll(files.note)
    files.commit().clear(files.note)
    assert files.content == {"m.safetensors": b"new one", "m.extra.pt": b"new side"}


@pytest.mark.parametrize("kill", [lambda files: None, put_side_away])
def test_a_killed_commit_of_a_file_is_rolled_back_before(
    kill: Callable[[Files], None], files: Files
) -> None:
    kill(files)
    assert not files.commit().roll(files.note)
    assert files.content == BEFORE


def test_a_pair_of_which_no_file_is_the_one_noted_stays(files: Files) -> None:
    """As in a copy of all."""
    with pytest.raises(Unsupported, match=r"unclear which side file goes with m\.safetensors"):
        files.commit().roll(replace(files.note, new=1))
    assert files.content == BEFORE


def test_a_file_that_was_put_among_the_staged_ones_stays(files: Files) -> None:
    files.commit().replace(files.note)
    fill(files.staged, {"mine": b"mine"})
    with pytest.raises(Committed, match="mine is not what was recorded; nothing was removed"):
        files.commit().clear(files.note)
    assert content(files.staged) == {
        "mine": b"mine",
        "m.extra.pt": b"new side",
        OLD_SIDE: b"old side",
    }


def test_a_side_file_that_was_put_in_place_meanwhile_is_in_the_way(files: Files) -> None:
    files.commit().replace(files.note)
    files.side.write_bytes(b"mine")
    with pytest.raises(Unsupported, match=r"m\.extra\.pt: is in the way"):
        files.commit().clear(files.note)
    assert files.side.read_bytes() == b"mine"
    assert (files.staged / OLD_SIDE).exists()


def test_a_side_file_that_came_is_not_replaced_by_the_old_one(files: Files) -> None:
    put_side_away(files)
    files.side.write_bytes(b"mine")
    before = files.content
    with pytest.raises(Unsupported, match=r"m\.extra\.pt: is in the way"):
        files.commit().roll(files.note)
    assert files.content == before
