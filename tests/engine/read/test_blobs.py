"""Packed blobs that a tensor is computed of are decoded once each, within the budget."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits
from merge_adapters import run
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import ZStandard
from zstandard import ZstdCompressor

from ckptool.core import codec
from ckptool.core.catalog import EncodedBlob
from ckptool.core.sharding.index import ChunkIndex
from ckptool.engine.read import gather, kept
from ckptool.storage.local import LocalSource

ROWS, COUNT = 3000, 6
"""Of 1 MiB and more, so that they are several tiles."""


def model(number: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(number)
    return {name: torch.randn(ROWS, 512, generator=random) for name in ("a", "b")}


@pytest.fixture
def packed(tmp_path: Path) -> list[str]:
    """Checkpoints of two tensors in blobs."""
    for number in range(COUNT):
        state: dict[str, Any] = {**model(number)}
        writer = dcp.FileSystemWriter(tmp_path / f"{number}", _extensions=[ZStandard()])
        dcp.save(state, storage_writer=writer, no_dist=True)
    return [str(tmp_path / f"{number}") for number in range(COUNT)]


def test_each_blob_is_decoded_once(
    packed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each index of chunks is made once."""
    decoded, indexed = Counter[Any](), Counter[str]()

    def decode(data: codec.Bytes, *rest: Any, what: str) -> codec.Bytes:
        decoded[what] += 1
        return codec.decode(data, *rest, what=what)

    def index(entry: Any) -> ChunkIndex:
        indexed[f"{entry.chunks[0].at.file} {entry.name}"] += 1
        return ChunkIndex(entry)

    monkeypatch.setattr(kept, "decode", decode)
    monkeypatch.setattr(gather, "ChunkIndex", index)
    out = tmp_path / "out.safetensors"
    code, said = run(out, "--average", *packed, "--workers", "1")
    assert code == 0, said
    assert len(decoded) == 2 * COUNT
    assert set(decoded.values()) == {1}
    assert set(indexed.values()) == {1}
    terms = [model(number) for number in range(COUNT)]
    for name, found in load_file(out).items():
        total = reduce(torch.add, [term[name].double() for term in terms])
        assert bits(found) == bits((total / COUNT).float())


def test_the_blobs_of_all_sources_count_within_the_budget(
    packed: list[str], tmp_path: Path
) -> None:
    words = ("--average", *packed, "--budget")
    code, said = run(tmp_path / "out.safetensors", *words, "32MiB")
    assert code == 4
    decoded = COUNT * ROWS * 512 * 4
    needed = int(said.split("one worker needs ")[1].split()[0].replace(",", ""))
    assert 0 < needed - (28 << 20) - decoded < ROWS * 512 * 4 * 1.01
    hint = said.split("--budget ")[1].split()[0]
    assert run(tmp_path / "out.safetensors", *words, hint)[0] == 0


def test_a_blob_takes_no_more_memory_than_is_counted(tmp_path: Path) -> None:
    plain = bytes(range(256)) * (1 << 16)
    noise = torch.randint(0, 256, (1 << 22,), dtype=torch.uint8).numpy().tobytes()
    stored = ZstdCompressor().compress(plain + noise)
    (tmp_path / "f").write_bytes(stored)
    size = len(plain) + len(noise)
    at = EncodedBlob("f", 0, len(stored), "zstd", size, 0, (1,))
    with closing(LocalSource(tmp_path, {}).reader()) as reader:
        tracemalloc.start()
        try:
            data = kept.Blobs(reader, {}).decode(at, None)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert data == plain + noise
    assert peak < len(stored) + 1.3 * size
