"""One cause is one finding, with everything it affects; ignored errors are mentioned."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case
from recipes.damage import DAMAGE

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks.consistency import conflict_problems
from ckptool.commands.verify.codes import Severity
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.verify import verify
from ckptool.core.catalog import Catalog
from ckptool.errors import UNREAD, Problem, UsageError


def checked(path: Path, **options: Any) -> VerifyReport:
    return verify(path, VerifyOptions(workers=2, **options))


def codes(report: VerifyReport) -> set[str]:
    return {f.code for f in report.findings if f.severity is not Severity.INFO}


def test_a_conflict_has_the_name_of_what_cannot_be_read() -> None:
    conflicts = {
        "a": Problem("lost", "file-missing", file="f"),
        "b": Problem("lost", "file-missing", file="g", tensor="c"),
        "d": "differs",
    }
    problems = conflict_problems(Catalog("dcp", {}, {}, {}, conflicts=conflicts))
    assert [(p.file, p.tensor) for p in problems] == [("f", "a"), ("g", "c"), (None, "d")]


@pytest.mark.parametrize(
    ("source", "damage", "code", "tensors"),
    [
        ("rank_base", "rank_truncated", "zip-structure", 4),
        ("hf_sharded", "shard_truncated", "file-truncated", 5),
        ("dcp_base", "truncated", "file-truncated", 3),
        ("dcp_base", "file_lost", "file-missing", 4),
        ("dcp_base", "file_empty", "file-empty", 5),
    ],
)
def test_a_cause_is_one_finding_with_all_that_it_affects(
    source: str, damage: str, code: str, tensors: int, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(source)
    assert DAMAGE[damage].source == source
    DAMAGE[damage].apply(folder)
    report = checked(folder)
    (found,) = report.fails(strict=True)
    names = {affected.tensor for affected in found.affected} & case(source).truth.keys()
    assert (found.code, len(names)) == (code, tensors)
    assert found.message.startswith((f"{found.file}:", f"'{found.file}'"))
    assert str(next(iter(found.affected)).tensor) in found.message


@pytest.mark.parametrize(
    ("source", "file", "code"),
    [
        ("hf_shards", "model-00001-of-00004.safetensors", "file-truncated"),
        ("deepspeed_zero_2", "**/*optim_states.pt", "zip-structure"),
        ("bin_shards", "*.bin", "zip-structure"),
    ],
)
def test_a_cut_file_is_one_finding(
    source: str, file: str, code: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(source)
    cut = min(folder.glob(file))
    os.truncate(cut, int(cut.stat().st_size * 0.9))
    (found,) = checked(folder).fails(strict=True)
    assert (found.code, found.file) == (code, cut.relative_to(folder).as_posix())
    assert "None" not in found.message


def test_a_gap_that_no_lost_file_explains_is_its_own_finding(
    copy_of: Callable[[str], Path],
) -> None:
    """Of a cut file whose parts the metadata places, another gap is another cause."""
    folder = copy_of("dcp_base")
    DAMAGE["chunk_gap"].apply(folder)
    DAMAGE["file_empty"].apply(folder)
    assert {"chunk-gap", "file-empty"} <= codes(checked(folder))


def test_a_stray_file_does_not_explain_a_gap(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dcp_base")
    DAMAGE["chunk_gap"].apply(folder)
    (folder / "stray.pt").touch()
    assert "chunk-gap" in {finding.code for finding in verify(folder, VerifyOptions()).findings}


def test_what_a_cut_file_affects_is_told_in_words(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dcp_fsdp2")
    with open(folder / "__3_0.distcp", "r+b") as file:
        file.truncate(2000)
    findings = verify(folder, VerifyOptions()).findings
    messages = [one.message for finding in findings for one in finding.affected]
    assert messages
    assert not any("Affected(" in message for message in messages)


def test_strict_and_ignore(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dcp_base")
    DAMAGE["stale_files"].apply(folder)
    assert checked(folder).ok
    assert not checked(folder, strict=True).ok
    ignored = checked(folder, strict=True, ignore=("file-unused", "bytes-unused"))
    assert ignored.ok
    assert not codes(ignored)
    with pytest.raises(UsageError, match="no such code") as caught:
        checked(folder, ignore=("file-unusd",))
    assert caught.value.hint == "did you mean file-unused?"


def test_what_could_not_be_read_is_not_checked_though_it_is_ignored(
    copy_of: Callable[[str], Path],
) -> None:
    """The answer says so, and no more bytes count as read than were."""
    folder = copy_of("dcp_base")
    whole = checked(folder)
    DAMAGE["truncated"].apply(folder)
    report = checked(folder, ignore=("file-truncated",))
    assert report.ok
    assert report.summary.startswith("OK: not all data read and checked")
    assert "; 1 error ignored: file-truncated (__1_0.distcp)" in report.summary
    assert report.nbytes < whole.nbytes
    quick = checked(folder, ignore=("file-truncated",), quick=True)
    assert "1 error ignored: file-truncated" in quick.summary


def test_a_kind_that_cannot_be_read_is_one_finding_for_all_parameters(tmp_path: Path) -> None:
    state = {number: {"grads": deque([torch.ones(3)])} for number in range(6)}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": {"state": state}}, tmp_path / "c.pt")
    (finding,) = (f for f in checked(tmp_path / "c.pt").findings if f.code == UNREAD)
    assert len(finding.affected) == 6
    said = "holds tensors that cannot be read (collections.deque)"
    assert finding.message.endswith(f" and 3 more: {said}")
