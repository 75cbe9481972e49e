"""Runs that are read together are those asked for, in memory that does not grow with their gaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptool.engine.read.byte_reader import ByteReader
from ckptool.storage.local import LocalReader, LocalSource

GAP = 4 << 10


def test_a_million_runs_do_not_bring_the_bytes_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read, real = tmp_path / "runs", list[int](), LocalReader.read_into
    path.write_bytes(b"".join(bytes([n % 251]) + bytes(GAP - 1) for n in range(2_000)))

    def counted(self: LocalReader, file: str, offset: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        real(self, file, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_into", counted)
    reader = ByteReader(LocalSource.file(path))
    found = reader.read_close([("runs", n * GAP, 1) for n in range(2_000)])
    assert b"".join(found) == bytes(n % 251 for n in range(2_000))
    assert len(read) < 2_000
    assert sum(read) < 3 << 20
