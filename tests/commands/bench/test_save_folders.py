"""What a save leaves behind on disk, and how it is removed."""

from __future__ import annotations

from pathlib import Path

from ckptool.commands.bench.save_folders import DiskFolder, StoreFolder, save_folder
from ckptool.commands.bench.worker.abort import _has_bytes
from ckptool.storage.url import location


def test_files_of_a_folder(tmp_path: Path) -> None:
    assert not _has_bytes(tmp_path / "none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty").touch()
    assert not _has_bytes(tmp_path)
    (DiskFolder(tmp_path) / "b").write(memoryview(b"xyz"))
    assert _has_bytes(tmp_path)
    assert DiskFolder(tmp_path).sizes() == {"a/empty": 0, "b": 3}


def test_a_folder_a_file_and_a_link_are_removed_but_not_what_a_link_leads_to(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").touch()
    kept.mkdir()
    (kept / "mine").touch()
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "folder" / "link").symlink_to(kept)
    (tmp_path / "file").touch()
    for name in ("folder", "file", "link", "none"):
        (DiskFolder(tmp_path) / name).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert list(kept.iterdir()) == [kept / "mine"]


def test_what_is_saved_into_is_on_a_disk_or_in_a_store(tmp_path: Path) -> None:
    assert save_folder(tmp_path, abort=True) == DiskFolder(tmp_path)
    stored = save_folder(location("s3://bucket/run"), abort=False)
    assert isinstance(stored, StoreFolder)
    assert (stored / "a").target == "s3://bucket/run/a"
    assert (stored.filesystem, stored.clients[0], stored.disk) == ("s3://", "fsspec", None)
