"""The notes beside an output."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from ckptool.errors import Unsupported
from ckptool.storage.note import LARGEST, read_note


def test_a_note_takes_memory_for_its_own_bytes(tmp_path: Path) -> None:
    """Not for the most that it may have, which a limit of the address space does not grant."""
    note = tmp_path / "note"
    note.write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert read_note(note) == b"{}"
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


def test_a_note_that_is_too_large_is_refused(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with note.open("wb") as stream:
        stream.truncate(LARGEST + 1)
    with pytest.raises(Unsupported, match="more than 268,435,456 bytes"):
        read_note(note)
