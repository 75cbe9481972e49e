"""What a save leaves behind on disk."""

from __future__ import annotations

from pathlib import Path

from ckptool.commands.bench.files import file_sizes, has_bytes


def test_files_of_a_folder(tmp_path: Path) -> None:
    assert not has_bytes(tmp_path / "none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty").touch()
    assert not has_bytes(tmp_path)
    (tmp_path / "b").write_bytes(b"xyz")
    assert has_bytes(tmp_path)
    assert file_sizes(tmp_path) == {"a/empty": 0, "b": 3}
