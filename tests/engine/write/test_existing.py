"""What is at a target: what counts as ckptool's, what else stays, and what each refusal says."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from engine.write.trees import content, fill

from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.engine.write.existing import (
    already_in_store,
    changed_files,
    charged_note,
    in_conflict,
    keep_mode,
    keep_modes,
    kept_entries,
    left_behind,
    move_kept,
    not_known,
    outputs,
    refuse_existing,
    remove_emptied,
    remove_own,
    remove_staged,
    require_no_conflict,
    require_no_foreign,
    require_whole,
    stamps,
    stands_whole,
    statuses,
)
from ckptool.engine.write.room import require_short_names, require_space
from ckptool.engine.write.stage import StageOptions
from ckptool.errors import Committed, TransferError, Unsupported

FILES = {"a": b"1", "sub/b": b"22", "sub/deep/c": b"333"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "run", FILES)


# Which files are as noted


def test_stamps_are_sizes_and_times_of_what_is_there(folder: Path) -> None:
    os.utime(folder / "sub" / "b", ns=(5, 7))
    assert stamps(folder, ["sub/b", "gone", "no/folder"]) == {"sub/b": (2, 7)}
    assert stamps(folder / "gone", ["a"]) == {}
    assert stamps(folder / "a", ["b"]) == {}


def test_files_come_in_the_order_of_their_names_and_links_are_not_followed(folder: Path) -> None:
    (folder / "link").symlink_to("a")
    (folder / "around").symlink_to("sub")
    found = statuses(folder, ["sub/b", "link", "around/b", "a"])
    assert [*found] == ["sub/b", "link", "a"]
    assert stat.S_ISLNK(found["link"].st_mode)


def test_a_folder_stands_whole_if_it_is_the_one_noted_with_each_file_unchanged(
    folder: Path,
) -> None:
    noted, inode = stamps(folder, FILES), folder.stat().st_ino
    assert stands_whole(folder, inode, noted)
    assert not stands_whole(folder, None, noted)
    assert not stands_whole(folder, inode + 1, noted)
    (folder / "a").write_bytes(b"other")
    assert not stands_whole(folder, inode, noted)
    assert changed_files(folder, noted) == ["a"]
    (folder / "a").unlink()
    assert not stands_whole(folder, inode, noted)
    assert changed_files(folder, noted) == [], "what is gone has not changed"


# What a run has staged


SIZES = {name: len(data) for name, data in FILES.items()}


def test_what_was_written_is_removed_with_its_folder_however_far_it_came(folder: Path) -> None:
    (folder / "sub" / "b").write_bytes(b"2")
    (folder / "a").unlink()
    remove_staged(folder, SIZES)
    assert not folder.exists()


def more(folder: Path) -> str:
    fill(folder, {"sub/mine": b"mine"})
    return "sub/mine"


def larger(folder: Path) -> str:
    (folder / "a").write_bytes(b"larger")
    return "a"


def another_folder(folder: Path) -> str:
    fill(folder, {"other/x": b"", "other/y": b""})
    return "other/"


def link(folder: Path) -> str:
    (folder / "a").unlink()
    (folder / "a").symlink_to("sub/b")
    return "a"


@pytest.mark.parametrize("change", [more, larger, another_folder, link])
def test_a_staged_folder_with_anything_else_in_it_stays(
    change: Callable[[Path], str], folder: Path
) -> None:
    name = change(folder)
    before = content(folder)
    for check in (remove_staged, require_no_foreign):
        with pytest.raises(Unsupported, match=f"holds {name}, which ckptool did not write") as told:
            check(folder, SIZES)
        assert f"mv {folder / name} ELSEWHERE" in str(told.value.hint)
    assert content(folder) == before


def test_what_was_written_must_still_be_there_whole(folder: Path) -> None:
    require_whole(folder, SIZES)
    (folder / "a").unlink()
    (folder / "sub" / "b").write_bytes(b"2")
    with pytest.raises(TransferError, match="a, sub/b: removed or cut short after it was written"):
        require_whole(folder, SIZES)


def test_a_disk_needs_room_for_what_is_not_staged_yet(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "not" / "there" / "yet"
    require_space(target, folder, SIZES)
    with pytest.raises(Unsupported, match=r"yet: 4,611,686,018,427,404,288 bytes are needed, .*"):
        require_space(target, folder, {"large": 1 << 62})


@pytest.mark.parametrize(
    ("blocks", "files", "why"),
    [
        (6, 100, "28,672 bytes are needed, 24,576 are free"),
        (100, 6, "7 files are to be written, and the disk has room for 6 more"),
    ],
)
def test_each_file_takes_whole_blocks_and_a_place_of_its_own(
    blocks: int, files: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files, and four notes of the run."""
    free = os.statvfs_result((4096, 4096, 100, blocks, blocks, 100, files, files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: free)
    sizes = {"a": 1, "b": 4096, "c": 4095}
    with pytest.raises(Unsupported, match=why):
        require_space(tmp_path, tmp_path / "staged", sizes)
    free = os.statvfs_result((4096, 4096, 100, 7, 7, 100, 7, 7, 0, 255))
    require_space(tmp_path, tmp_path / "staged", sizes)


def test_a_file_is_in_the_way_of_a_folder_to_write_into(folder: Path) -> None:
    with pytest.raises(Unsupported, match="a: not a folder to write into"):
        require_space(folder / "a" / "target", folder, SIZES)


def test_names_are_as_long_as_the_disk_allows(folder: Path) -> None:
    require_short_names(folder, ["x" * 255, "sub/" + "é" * 127], "shorter")
    with pytest.raises(Unsupported, match=r"names have at most 255 bytes, é{128} has 256") as told:
        require_short_names(folder / "new", ["sub/" + "é" * 128], "shorter")
    assert told.value.hint == "shorter"


# What else is there


def test_what_is_kept_is_listed_by_whole_folders(folder: Path) -> None:
    fill(folder, {"mine/x": b"", "mine/y": b"", "sub/z": b""})
    (folder / "link").symlink_to("sub")
    assert kept_entries(folder, ["a", "sub/b"]) == ["link", "mine/", "sub/deep/", "sub/z"]
    assert kept_entries(folder, [*FILES, "mine/x", "mine/y", "sub/z", "link"]) == []
    assert kept_entries(folder, ()) == ["a", "link", "mine/", "sub/"]


@pytest.mark.parametrize(
    ("own", "new", "found"),
    [
        ((), ["new", "sub/new"], []),
        ((), ["a", "sub/b", "new"], ["a", "sub/b"]),
        (("a", "sub/b"), ["a", "sub/b"], []),
        ((), ["a/x/y"], ["a"]),
        (("a",), ["a/x/y"], []),
        ((), ["around/b"], ["around"]),
        (("a",), ["sub"], ["sub"]),
    ],
)
def test_what_is_in_the_place_of_new_files(
    own: Collection[str], new: list[str], found: list[str], folder: Path
) -> None:
    (folder / "around").symlink_to("sub")
    assert in_conflict(folder, own, new) == found


def test_a_conflict_is_named() -> None:
    require_no_conflict("run", [])
    with pytest.raises(Unsupported, match="run: a, b: not part of the checkpoint there") as told:
        require_no_conflict("run", ["a", "b"])
    assert "ckptool never removes files that it did not write" in str(told.value.hint)


def test_what_is_kept_moves_into_the_new_folder(folder: Path, tmp_path: Path) -> None:
    fill(folder, {"mine/x": b"x", "sub/z": b"z"})
    (folder / "sub").chmod(0o750)
    new = fill(tmp_path / "new", {"index": b""})
    assert move_kept(folder, new, [*FILES]) == []
    assert content(new) == {"index": b"", "mine/x": b"x", "sub/z": b"z"}
    assert stat.S_IMODE((new / "sub").stat().st_mode) == 0o750
    assert content(folder) == FILES


def test_folders_of_one_name_are_joined_and_what_is_taken_stays(
    folder: Path, tmp_path: Path
) -> None:
    fill(folder, {"mine/x": b"x", "mine/y": b"y", "z": b"z"})
    new = fill(tmp_path / "new", {"mine/y": b"new", "z/inside": b"new"})
    assert move_kept(folder, new, [*FILES]) == ["mine/y", "z"]
    assert content(new) == {"mine/x": b"x", "mine/y": b"new", "z/inside": b"new"}
    assert content(folder) == FILES | {"mine/y": b"y", "z": b"z"}


def test_a_folder_that_was_joined_is_gone(folder: Path, tmp_path: Path) -> None:
    fill(folder, {"mine/x": b"x"})
    new = fill(tmp_path / "new", {"mine/y": b"y"})
    assert move_kept(folder, new, [*FILES]) == []
    assert content(new) == {"mine/x": b"x", "mine/y": b"y"}
    assert not (folder / "mine").exists()


# Modes


def test_what_replaces_something_gets_its_mode(folder: Path, tmp_path: Path) -> None:
    new = fill(tmp_path / "new", {"a": b"", "sub/b": b"", "sub/new": b""})
    for name, mode in (("", 0o770), ("a", 0o600), ("sub", 0o711)):
        (folder / name).chmod(mode)
    usual = (new / "sub" / "new").stat().st_mode
    keep_modes(folder, new, ["a", "sub/b", "sub/new"])
    modes = {name: stat.S_IMODE((new / name).stat().st_mode) for name in ("", "a", "sub")}
    assert modes == {"": 0o770, "a": 0o600, "sub": 0o711}
    assert (new / "sub" / "new").stat().st_mode == usual


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_replaces_something_gets_its_owner(folder: Path, tmp_path: Path) -> None:
    new = fill(tmp_path / "new", FILES)
    os.chown(folder / "a", 1234, 4321)
    keep_mode(folder / "a", new / "a")
    assert ((new / "a").stat().st_uid, (new / "a").stat().st_gid) == (1234, 4321)


def test_a_file_does_not_get_the_mode_of_a_folder_or_of_nothing(
    folder: Path, tmp_path: Path
) -> None:
    new = fill(tmp_path / "new", FILES)
    before = (new / "a").stat().st_mode
    for old in (folder / "sub", folder / "gone", folder / "a" / "below"):
        keep_mode(old, new / "a")
    assert (new / "a").stat().st_mode == before


# Removal


def test_own_files_go_with_the_folders_that_are_then_empty(folder: Path) -> None:
    fill(folder, {"sub/mine": b"mine"})
    remove_own(folder, ["a", "gone", "sub/b", "sub/deep/c"])
    assert content(folder) == {"sub/mine": b"mine"}
    assert not (folder / "sub" / "deep").exists()
    remove_own(folder, ["sub/mine"])
    assert folder.exists()
    assert not list(folder.iterdir())


def test_nothing_behind_a_link_is_removed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    (folder / "around").symlink_to("sub")
    remove_own(tmp_path, ["link/a"])
    remove_own(folder, ["around/b", "around/deep/c"])
    remove_emptied(folder, ["around/b"])
    assert content(folder).keys() >= FILES.keys()
    assert (folder / "around").is_symlink()


def test_folders_are_removed_from_the_deepest_on(folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink()
    remove_emptied(folder, ["sub/deep/c", "gone/x"])
    assert not list(folder.iterdir())


def test_another_error_than_something_else_in_a_folder_is_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(leaf: str, dir_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rmdir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        remove_emptied(folder, ["sub/b"])


# What exists where output goes


def folder_of(*names: str) -> Layout:
    return Layout(tuple(FileLayout(name, (Literal(b""),)) for name in names), folder=True)


def file_of(*names: str) -> Layout:
    return Layout(tuple(FileLayout(name, (Literal(b""),)) for name in names), folder=False)


def options(
    own: Collection[str] | None = None, *, overwrite: bool = True, resume: bool = False
) -> StageOptions:
    return StageOptions("plan", "source", overwrite=overwrite, resume=resume, find_own=lambda: own)


def test_outputs_are_the_folder_or_all_files_and_the_side_file(tmp_path: Path) -> None:
    assert outputs(tmp_path / "m", folder_of("a", "b")) == [tmp_path / "m"]
    names = ("m.extra.pt", "m.safetensors")
    alone, both = file_of("m.safetensors"), file_of(*names)
    assert outputs(tmp_path / "m.safetensors", alone) == [tmp_path / name for name in names]
    assert outputs(tmp_path / "m.safetensors", both) == [tmp_path / name for name in names]
    assert outputs(tmp_path / "m.pt", file_of("m.pt")) == [tmp_path / "m.pt"]


def test_what_exists_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    refuse_existing(tmp_path / "new", folder_of("a"), options(overwrite=False))
    fill(tmp_path, {"m.safetensors": b"", "m.extra.pt": b""})
    with pytest.raises(
        Unsupported, match=r"m\.extra\.pt, .*m\.safetensors already exist\n"
    ) as told:
        refuse_existing(
            tmp_path / "m.safetensors", file_of("m.safetensors"), options(overwrite=False)
        )
    assert (
        told.value.hint == "--overwrite replaces them once all is written, if that is a checkpoint"
    )
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(Unsupported, match=r"m\.extra\.pt already exists\n") as told:
        refuse_existing(
            tmp_path / "m.safetensors", file_of("m.safetensors"), options(overwrite=False)
        )
    assert told.value.hint == "--overwrite replaces it once all is written, if that is a checkpoint"
    with pytest.raises(Unsupported, match="is a file, but a folder would be written"):
        refuse_existing(tmp_path / "m.extra.pt", folder_of("a"), options(overwrite=False))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_side_file_that_came_is_in_the_way_of_a_run_that_goes_on(
    overwrite: bool, tmp_path: Path
) -> None:
    fill(tmp_path, {"m.extra.pt": b""})
    resumed = options(overwrite=overwrite, resume=True)
    with pytest.raises(Unsupported, match=r"m\.extra\.pt(: ckptool did not| already)"):
        refuse_existing(tmp_path / "m.safetensors", file_of("m.safetensors"), resumed)


def test_a_checkpoint_is_replaced_with_files_of_others_in_it(folder: Path) -> None:
    refuse_existing(folder, folder_of("a", "new"), options(own=["a"]))


@pytest.mark.parametrize(
    ("own", "names", "words"),
    [
        (None, ["new"], "run: not a checkpoint, and is not replaced"),
        (["a"], ["sub/b"], "run: sub/b: not part of the checkpoint there"),
    ],
)
def test_a_folder_of_others_is_not_replaced(
    own: list[str] | None, names: list[str], words: str, folder: Path
) -> None:
    with pytest.raises(Unsupported, match=words):
        refuse_existing(folder, folder_of(*names), options(own=own))


def test_an_empty_folder_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    refuse_existing(tmp_path / "run", folder_of("a"), options())


def test_a_link_to_a_folder_is_not_replaced(folder: Path) -> None:
    latest = folder.with_name("latest")
    latest.symlink_to(folder)
    with pytest.raises(Unsupported, match="latest: is a link, and is not replaced") as told:
        refuse_existing(latest, folder_of("a"), options(own=["a"]))
    assert told.value.hint == f"name the folder {folder}"


def test_a_folder_and_a_file_do_not_replace_each_other(folder: Path) -> None:
    with pytest.raises(Unsupported, match="run: is a folder, but a file would be written"):
        refuse_existing(folder, file_of("run"), options(own=["run"]))
    with pytest.raises(Unsupported, match="a: is a file, but a folder would be written"):
        refuse_existing(folder / "a", folder_of("x"), options(own=["a"]))


def test_a_file_of_others_is_not_replaced(tmp_path: Path) -> None:
    target, layout = tmp_path / "m.safetensors", file_of("m.safetensors")
    fill(tmp_path, {"m.safetensors": b""})
    with pytest.raises(Unsupported, match="safetensors: not a checkpoint, and is not replaced"):
        refuse_existing(target, layout, options())
    fill(tmp_path, {"m.extra.pt": b""})
    with pytest.raises(Unsupported, match=r"extra\.pt: ckptool did not write it") as told:
        refuse_existing(target, layout, options(own=["m.safetensors"]))
    assert "would read it as a part of" in told.value.message
    refuse_existing(target, layout, options(own=["m.safetensors", "m.extra.pt"]))


# Errors that others raise


def test_what_is_there_in_a_store_is_counted() -> None:
    assert already_in_store("s3://b/m", ["x", "y"], "hint").message == (
        "s3://b/m already exists (2 files, such as x)"
    )
    error = not_known("s3://b/m/note", "s3://b/m", ["x"], resumes=False)
    assert error.message.startswith("s3://b/m/note: speaks of x, which this run does not write")
    assert "remove all that is in s3://b/m" in str(error.hint)
    assert "at most 1,234 bytes of s3://b/m/x (parts" in charged_note({"s3://b/m/x": 1234})


def test_cleaning_up_that_failed_is_an_error_after_the_commit_or_before(tmp_path: Path) -> None:
    failed = OSError(errno.EACCES, "Permission denied")
    after = left_behind(tmp_path, failed, options())
    before = left_behind(tmp_path, failed, options(), done=False)
    assert isinstance(after, Committed)
    assert "the new one is complete, but cleaning up failed: Permission denied" in after.message
    assert not isinstance(before, Committed)
    assert "could not be rolled back: Permission denied" in before.message
