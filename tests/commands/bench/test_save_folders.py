"""What a save leaves behind on disk."""

from __future__ import annotations

from pathlib import Path

from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.worker.abort import _has_bytes


def test_files_of_a_folder(tmp_path: Path) -> None:
    assert not _has_bytes(tmp_path / "none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty").touch()
    assert not _has_bytes(tmp_path)
    (tmp_path / "b").write_bytes(b"xyz")
    assert _has_bytes(tmp_path)
    assert DiskFolder(tmp_path).sizes() == {"a/empty": 0, "b": 3}
