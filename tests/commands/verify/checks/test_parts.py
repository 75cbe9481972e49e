"""A checkpoint in a store, verified in parts, has the findings of one on a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from conftest import GOOD, Case, by_name
from recipes.damage import DAMAGE

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks import parts
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.verify import verify
from ckptool.storage.url import location


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PART", 10_000)


def found(report: VerifyReport) -> object:
    """What a report says, without where the checkpoint lies and when it was written."""
    findings = [
        (f.code, f.file, f.tensor, f.affected, f.message if f.file else "")
        for f in report.findings
        if f.code != "data-newer"
    ]
    return report.ok, report.tensors, report.files, sorted(findings, key=repr)


def in_store(root: Path, inside: str = "") -> VerifyReport:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in root.rglob("*"):
        if file.is_file():
            memory.pipe_file(f"/run/{file.relative_to(root)}", file.read_bytes())
    return verify(location(f"memory://run{inside}"), VerifyOptions())


@pytest.mark.parametrize("one", [case for case in GOOD if case.path.is_dir()], ids=by_name)
def test_the_same_is_found_in_a_good_checkpoint(one: Case) -> None:
    assert found(in_store(one.path)) == found(verify(one.path, VerifyOptions()))


@pytest.mark.parametrize("name", [name for name in DAMAGE if DAMAGE[name].source.startswith("dcp")])
def test_the_same_is_found_in_a_damaged_one(name: str, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of(DAMAGE[name].source)
    DAMAGE[name].apply(folder)
    assert found(in_store(folder)) == found(verify(folder, VerifyOptions()))
