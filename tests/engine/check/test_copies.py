"""A rank's file copied over another's, if nothing inside identifies its rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import convert_to

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import parse_dtype
from ckptool.engine.check.replicas import copied_files
from ckptool.errors import Damaged
from ckptool.storage.local import LocalSource


@pytest.mark.parametrize(
    ("fixture", "one", "other"),
    [
        ("vllm_sharded_state", "model-rank-0-part-0", "model-rank-1-part-0"),
        ("megatron_torch", "mp_rank_00", "mp_rank_01"),
        ("llama_consolidated", "consolidated.00", "consolidated.01"),
    ],
)
def test_a_file_copied_over_another_ranks_is_found(
    fixture: str, one: str, other: str, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """By verify; and convert, which would write one rank's rows twice, refuses."""
    folder = copy_of(fixture)
    assert verify(folder, VerifyOptions()).ok
    pairs = [(p, Path(str(p).replace(one, other))) for p in folder.rglob("*") if one in str(p)]
    files = [(source, target) for source, target in pairs if source.is_file()]
    assert files
    for source, target in files:
        shutil.copy(source, target)
    report = verify(folder, VerifyOptions())
    assert "rank-copied" in {finding.code for finding in report.findings}
    assert not report.ok
    with pytest.raises(Damaged, match="identical to"):
        convert_to("safetensors", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


VARIED = bytes(range(256)) * 48
"""Longer than what is read of both ends first."""


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (VARIED, VARIED, 1),
        (VARIED, VARIED[:6_000] + b"!" + VARIED[6_001:], 0),
        (bytes(16), bytes(16), 0),
    ],
    ids=["copied", "alike at both ends", "zeros"],
)
def test_files_of_one_value_or_with_alike_ends_are_not_copies(
    one: bytes, other: bytes, found: int, tmp_path: Path
) -> None:
    """Of one value as the state of an optimizer that has not made a step."""
    (tmp_path / "a").write_bytes(one)
    (tmp_path / "b").write_bytes(other)
    count, size = len(one) // 4, len(one)
    chunks = tuple(
        Chunk(Box((count * n,), (count * n + count,)), Extent(name, 0, (4,)))
        for n, name in enumerate("ab")
    )
    entry = TensorEntry("w", ("w",), parse_dtype("float32"), (2 * count,), chunks)
    catalog = Catalog("vllm", {"w": entry}, {}, {"a": size, "b": size})
    assert len(list(copied_files(catalog, LocalSource.folder(tmp_path)))) == found
