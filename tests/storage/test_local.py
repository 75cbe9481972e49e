"""Odd folders: pipes, links, other users' folders, and far too much of everything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptool.commands.open import open_checkpoint
from ckptool.errors import CkptoolError, Damaged, NotFound, Unrecognized
from ckptool.storage import file_status as walk
from ckptool.storage import read_ahead
from ckptool.storage.local import LocalSource


def tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_subfolders_are_what_narrowing_gives(tmp_path: Path) -> None:
    source = LocalSource.folder(tree(tmp_path, "a", "b/c", "b/d/e", "b/d/f", "g/h/i"))
    found = source.subfolders()
    assert set(found) == {"b", "b/d", "g", "g/h"}
    for folder, inner in found.items():
        same = source.narrowed(folder)
        assert (inner.root, inner.files) == (same.root, same.files)


def test_links_that_fan_out_end(tmp_path: Path) -> None:
    last = tree(tmp_path / "last", "x")
    for level in range(4):
        here = tmp_path / f"level{level}"
        here.mkdir()
        for i in range(20):
            (here / str(i)).symlink_to(last)
        last = here
    with pytest.raises(NotFound, match="links lead to"):
        LocalSource.folder(last)


def test_everything_that_is_looked_at_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "_MOST_ENTRIES", 10)
    for i in range(9):
        (tmp_path / "data" / str(i)).mkdir(parents=True)
    assert not LocalSource.folder(tmp_path).files
    (tmp_path / "data" / "9").mkdir()
    with pytest.raises(NotFound, match="more than 10 files and folders, most of them in data") as e:
        LocalSource.folder(tmp_path)
    assert "move data away" in (e.value.hint or "")
    with pytest.raises(NotFound, match="most of them in it"):
        LocalSource.folder(tree(tmp_path / "flat", *map(str, range(11))))


def test_a_folder_that_vanished(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="cannot be listed"):
        LocalSource.folder(tmp_path / "gone")


def test_a_file_that_vanished(tmp_path: Path) -> None:
    source = LocalSource.folder(tree(tmp_path, "x"))
    (tmp_path / "x").unlink()
    assert source.changed(["x"]) == ["x"]
    with pytest.raises(NotFound, match="x: cannot be read"):
        source.read("x", 0, 1)


def test_a_name_with_a_null_character_is_not_a_file(tmp_path: Path) -> None:
    """As damaged metadata may name one."""
    source = LocalSource.folder(tmp_path)
    with pytest.raises(Damaged, match="the file is missing"):
        source.read("a\0b", 0, 4)


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    source = LocalSource.folder(tree(tmp_path, "x"))
    (tmp_path / "x").unlink()
    os.mkfifo(tmp_path / "x")
    with pytest.raises(CkptoolError):
        source.read("x", 0, 1)
    with pytest.raises(CkptoolError):
        LocalSource(tmp_path, {}).reader().read_into("x", 0, memoryview(bytearray(1)))


@pytest.mark.parametrize("link", [False, True])
def test_a_pipe_is_not_a_checkpoint(link: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    os.mkfifo(tmp_path / "pipe" if link else path)
    if link:
        path.symlink_to("pipe")
    with pytest.raises(Unrecognized, match="pipe"):
        open_checkpoint(path)


def test_a_path_with_a_null_character() -> None:
    with pytest.raises(NotFound, match="null"):
        open_checkpoint(Path("a\0b"))


@pytest.mark.parametrize(
    ("name", "others"),
    [(".metadata", ["__0_0.distcp"]), ("model.safetensors.index.json", ["config.json"])],
)
def test_metadata_of_a_hundred_gigabytes_is_not_read(
    name: str, others: list[str], tmp_path: Path
) -> None:
    tree(tmp_path, name, *others)
    os.truncate(tmp_path / name, 100 << 30)
    with pytest.raises(Damaged, match="107,374,182,400 bytes"):
        open_checkpoint(tmp_path)


def test_runs_that_lie_apart(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)))
    runs = [memoryview(bytearray(3)) for _ in range(4)]
    reader = LocalSource(tmp_path, {}).reader()
    reader.read_runs("f", 5, 30, runs)
    assert [bytes(run) for run in runs] == [bytes(range(n, n + 3)) for n in (5, 35, 65, 95)]
    with pytest.raises(Damaged, match="truncated"):
        reader.read_runs("f", 8, 30, runs)
    reader.close()


def test_runs_that_lie_apart_are_requested_unless_they_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(read_ahead, "will_need", lambda _, *span: asked.append(span))
    for cached in (None, 0, 3 * 4096, 1 << 20):
        monkeypatch.setattr(read_ahead, "cached_bytes", lambda *_, cached=cached: cached)
        reader = LocalSource(tmp_path, {}).reader()
        reader.read_runs("f", 0, 1 << 18, [memoryview(bytearray(4096)) for _ in range(3)])
        reader.close()
    assert asked == [(0, (2 << 18) + 4096)] * 3
