"""What convert leaves behind, verify says in the same words; what goes with a model counts too."""

from __future__ import annotations

import argparse
import datetime
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import UsageError

HEADER = {"format": "pt", "ss_seed": "42", "lora_alpha": "16"}


def foreign(folder: Path) -> Path:
    state = {
        "model": {"w": torch.ones(3)},
        "args": argparse.Namespace(lr=1),
        "when": datetime.datetime(2020, 1, 1),
        "names": frozenset(["a"]),
    }
    torch.save(state, folder / "m.pt")
    return folder / "m.pt"


def one_file(folder: Path) -> Path:
    save_file({"w": torch.ones(3)}, folder / "m.safetensors", metadata=HEADER)
    return folder / "m.safetensors"


def shards(folder: Path) -> Path:
    (folder / "hf").mkdir()
    for number in (1, 2):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({f"w{number}": torch.ones(3)}, folder / "hf" / name, metadata=HEADER)
    return folder / "hf"


@pytest.mark.parametrize(("make", "count"), [(foreign, 3), (one_file, 1), (shards, 2)])
def test_verify_says_what_convert_leaves_behind(make: object, count: int, tmp_path: Path) -> None:
    assert callable(make)
    source = make(tmp_path)
    report = ckptool.convert(source, tmp_path / "out", to="safetensors", fsync=False)
    noted = [note for note in report.notes if note.startswith("not carried")]
    found = [f for f in ckptool.verify(source).findings if f.code == "value-not-written"]
    assert len(noted) == count
    assert [finding.message for finding in found] == noted


def test_what_every_writer_puts_into_a_header_is_not_worth_a_note(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors", metadata={"format": "np"})
    codes = {finding.code for finding in ckptool.verify(tmp_path / "m.safetensors").findings}
    assert codes == {"no-checksum"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, and a copy of it."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(3)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "mine"}')
        (tmp_path / name / "tokenizer.json").write_text("{}")
    return tmp_path / "one"


def codes(one: Path, other: Path, **options: object) -> list[str]:
    report = ckptool.compare(one, other, **options)  # type: ignore[arg-type]
    return [finding.code for finding in report.verify.findings]


def test_files_that_go_with_the_model_are_compared(model: Path) -> None:
    other = model.with_name("other")
    assert codes(model, other) == []
    (other / "tokenizer.json").write_text("[]")
    assert codes(model, other) == ["companion-differs"]
    (other / "tokenizer.json").unlink()
    assert codes(model, other) == ["companion-missing"]
    assert not ckptool.compare(model, other, strict=True).verify.ok
    assert codes(other, model) == []


def test_files_of_assets_are_those_that_are_compared(model: Path) -> None:
    assets = model.with_name("assets")
    shutil.copytree(model, assets, ignore=shutil.ignore_patterns("*.safetensors"))
    (assets / "config.json").write_text('{"model_type": "yours"}')
    made = model.with_name("made")
    ckptool.convert(model, made, to="safetensors", hf_assets=assets, fsync=False)
    assert codes(model, made, hf_assets=assets) == []
    assert codes(model, made) == ["companion-differs"]
    with pytest.raises(UsageError, match="no such folder"):
        codes(model, made, hf_assets=assets / "none")


def test_a_single_file_lacks_what_goes_with_the_model(model: Path) -> None:
    made = model.with_name("m.safetensors")
    ckptool.convert(model, made, to="safetensors", fsync=False)
    assert codes(model, made) == ["companion-missing", "companion-missing"]
