"""Listed checksums of a checkpoint's files, and what convert excludes."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks import recorded_hashes
from ckptool.commands.verify.checks.consistency import catalog_problems
from ckptool.commands.verify.verify import verify
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME

LISTED = "integrity.json"
Copy = Callable[[str], Path]


@pytest.fixture
def listed(copy_of: Copy) -> Path:
    """A checkpoint with a list of its files, as ``--verify-integrity`` writes it."""
    folder = copy_of("megatron_torch_dist") / "iter_0000100"
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    (folder / LISTED).write_text(json.dumps({"algorithm": "sha256", "files": files}))
    return folder


def errors(folder: Path) -> list[tuple[str, str | None]]:
    found = verify(folder, VerifyOptions()).findings
    return [(one.code, one.file) for one in found if one.severity.value == "error"]


def test_files_as_they_were_listed(listed: Path) -> None:
    assert errors(listed) == []


def test_a_change_that_only_the_list_shows(listed: Path) -> None:
    config = listed / "metadata.json"
    config.write_text(config.read_text() + " ")
    assert errors(listed) == [("sha256-mismatch", "metadata.json")]


def test_a_listed_file_that_is_gone(listed: Path) -> None:
    value = json.loads((listed / LISTED).read_text())
    value["files"]["tokenizer.json"] = "0" * 64
    (listed / LISTED).write_text(json.dumps(value))
    assert errors(listed) == [("file-missing", "tokenizer.json")]


def test_a_list_covers_values_and_costs_no_second_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remarks() -> set[str]:
        return {f.code for f in verify(tmp_path, VerifyOptions()).findings} - {"config-missing"}

    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(64, 64)}, weights)
    assert remarks() == {"no-checksum"}
    files = {weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()}
    (tmp_path / LISTED).write_text(json.dumps({"algorithm": "sha256", "files": files}))
    monkeypatch.setattr(recorded_hashes, "file_digest", lambda *_: pytest.fail("read again"))
    assert remarks() == set()
    files[weights.name] = "0" * 64
    (tmp_path / LISTED).write_text(json.dumps({"algorithm": "sha256", "files": files}))
    assert errors(tmp_path) == [("sha256-mismatch", weights.name)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", [("index-unreadable", LISTED)]),
        ('{"algorithm": "md5", "files": {".metadata": "0"}}', []),
    ],
)
def test_a_list_of_another_kind(listed: Path, text: str, found: list[tuple[str, str]]) -> None:
    (listed / LISTED).write_text(text)
    assert errors(listed) == found
    about = [f.code for f in verify(listed, VerifyOptions()).findings if f.file == LISTED]
    assert about == [code for code, _ in found] or about == ["note"]


@pytest.fixture
def checklist(copy_of: Copy) -> Path:
    """Llama's weights with their checklist, as ``md5sum`` prints it."""
    folder = copy_of("llama_consolidated")
    lines = [
        f"{hashlib.md5(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(folder.iterdir())
    ]
    (folder / "checklist.chk").write_text("".join(lines))
    return folder


def test_a_checklist_that_is_right(checklist: Path) -> None:
    assert errors(checklist) == []


def test_an_empty_checklist_lists_nothing(checklist: Path) -> None:
    (checklist / "checklist.chk").write_text("")
    assert errors(checklist) == []


def test_a_change_that_only_the_checklist_shows(checklist: Path) -> None:
    params = checklist / "params.json"
    params.write_text(params.read_text() + " ")
    assert errors(checklist) == [("md5-mismatch", "params.json")]


def test_a_file_of_the_checklist_that_is_gone(checklist: Path) -> None:
    (checklist / "params.json").unlink()
    assert ("file-missing", "params.json") in errors(checklist)


@pytest.mark.parametrize(
    "text", ["no digest\n", "0123  params.json\n", f"{'0' * 32}  params.json\nno digest\n"]
)
def test_a_checklist_that_is_none(checklist: Path, text: str) -> None:
    (checklist / "checklist.chk").write_text(text)
    assert errors(checklist) == [("index-unreadable", "checklist.chk")]


# What convert leaves behind, verify says in the same words


def foreign(folder: Path) -> Path:
    state = {
        "model": {"w": torch.ones(3)},
        "args": argparse.Namespace(lr=1),
        "when": datetime.datetime(2020, 1, 1),
        "names": frozenset(["a"]),
    }
    torch.save(state, folder / "m.pt")
    return folder / "m.pt"


def test_convert_carries_the_milestones_of_a_scheduler(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.ones(3, requires_grad=True)], 0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 30])
    state = {"model": {"w": torch.ones(3)}, "scheduler": scheduler.state_dict()}
    torch.save(state, tmp_path / "m.pt")
    assert ckptool.verify(tmp_path / "m.pt").findings == ()
    ckptool.convert(tmp_path / "m.pt", tmp_path / "out.pt", to="torch-save", fsync=False)
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert written["scheduler"] == state["scheduler"]


def test_verify_says_what_convert_leaves_behind(tmp_path: Path) -> None:
    source = foreign(tmp_path)
    report = ckptool.convert(source, tmp_path / "out", to="safetensors", fsync=False)
    noted = [note for note in report.notes if note.startswith("not carried")]
    found = [f for f in ckptool.verify(source).findings if f.code == "value-not-written"]
    assert len(noted) == 3
    assert [finding.message for finding in found] == noted


def test_a_name_that_is_not_its_path_is_named() -> None:
    entry = TensorEntry("a.w", ("b", "w"), BY_NAME["float32"], (0,), ())
    (problem,) = catalog_problems(Catalog("dcp", {"a.w": entry}, {}, {}))
    assert (problem.code, problem.tensor) == ("name-mismatch", "a.w")
