"""What a save leaves behind, on disk and in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

from ckptool.commands.bench.files import (
    file_sizes,
    has_bytes,
    list_shared_memory,
    unused_shared_memory,
)


def test_shared_memory_that_nobody_holds_is_found() -> None:
    before = list_shared_memory()
    path = Path(f"/dev/shm/ckptool-test-{os.getpid()}")
    try:
        with open(path, "wb"):
            assert path not in unused_shared_memory(before)
            assert path in unused_shared_memory(before, {os.getpid()})
        assert path in unused_shared_memory(before)
    finally:
        path.unlink()


def test_files_of_a_folder(tmp_path: Path) -> None:
    assert not has_bytes(tmp_path / "none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty").touch()
    assert not has_bytes(tmp_path)
    (tmp_path / "b").write_bytes(b"xyz")
    assert has_bytes(tmp_path)
    assert file_sizes(tmp_path) == {"a/empty": 0, "b": 3}
