"""Whether the machine has room for a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptool.commands.bench.machine import require_room
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.worker.device import Accelerators
from ckptool.errors import Unsupported

MIB = 1 << 20


def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"[\d,]+ bytes of disk are needed, [\d,]+ are free"):
        require_room(DiskFolder(tmp_path), 10**18, 2, Accelerators())
    with pytest.raises(Unsupported, match="no such folder"):
        require_room(DiskFolder(tmp_path / "none"), 1, 2, Accelerators())


def test_too_little_memory_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=1000 * MIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(
        Unsupported, match=r"1,887,436,800 bytes of memory are needed .*1,048,576,000"
    ):
        require_room(DiskFolder(tmp_path), 200 * MIB, 2, Accelerators())
