"""Boxes that are read into memory: in parts of how many bytes, and by how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import ckptool
from ckptool.core.box import Box
from ckptool.core.dtype import BY_NAME
from ckptool.engine.read import tensors, tiles
from ckptool.engine.read.tensors import FillRequest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"weight": torch.ones(64, 8).bfloat16()}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


class Parts:
    """Memory that notes how many bytes it is asked for at a time."""

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self.sizes: list[int] = []

    @contextmanager
    def part(self, where: Box) -> Iterator[Any]:
        self.sizes.append(where.volume * self._itemsize)
        yield np.empty(where.shape, f"u{self._itemsize}")


def test_parts_are_as_large_as_their_numbers_in_memory(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_FILL", 1 << 10)
    checkpoint, parts = ckptool.open(saved), Parts(8)
    entry = checkpoint.entry("weight", BY_NAME["float64"])
    checkpoint.fill([FillRequest(entry, Box.whole(entry.shape), parts)])
    assert parts.sizes == [1 << 10] * 4


def test_parts_of_a_store_are_as_large_as_what_a_request_fetches(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4096, 4096, dtype=torch.uint8)}, tmp_path / "model.pt")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/run/model.pt", (tmp_path / "model.pt").read_bytes())
    places = [(str(tmp_path / "model.pt"), 1), ("memory://run/model.pt", 2)]
    for place, count in places:
        checkpoint, parts = ckptool.open(place), Parts(1)
        entry = checkpoint.entry("weight")
        checkpoint.fill([FillRequest(entry, Box.whole(entry.shape), parts)])
        assert len(parts.sizes) == count


def test_no_thread_is_started_that_finds_nothing_to_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read = tiles.read_tiles

    def note(source: Any, jobs: Any, sink: Any, workers: int) -> None:
        asked.append(workers)
        read(source, jobs, sink, workers)

    monkeypatch.setattr(tensors, "read_tiles", note)
    checkpoint = ckptool.open(saved)
    entry = checkpoint.entry("weight")
    checkpoint.fill([FillRequest(entry, Box.whole(entry.shape), Parts(2))], workers=8)
    assert asked == [1]
