"""Files that go with a model are compared too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import UsageError


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


def test_a_config_that_a_cast_changed_is_none_that_differs(model: Path) -> None:
    """Tensors are compared by their types; what convert writes of them is no second difference."""
    other = model.with_name("other")
    (model / "config.json").write_text('{"model_type": "mine", "torch_dtype": "bfloat16"}')
    (other / "config.json").write_text('{"model_type": "mine", "torch_dtype": "float16"}')
    assert codes(model, other) == []
    differing = '{"model_type": "yours", "torch_dtype": "bfloat16"}'
    for text, code in ((differing, "companion-differs"), ("{", "metadata-unreadable")):
        (other / "config.json").write_text(text)
        assert codes(model, other) == [code]


def test_what_a_config_says_beside_its_text_config_is_compared(model: Path) -> None:
    """A reader of sizes takes them from there: these are not all that a config says."""
    other = model.with_name("other")
    config = '{"size": %s, "text_config": {"size": 5, "dtype": "%s"}}'
    (model / "config.json").write_text(config % (7, "float32"))
    (other / "config.json").write_text(config % (7, "bfloat16"))
    assert codes(model, other) == []
    for size in (8, "7.0", "true"):
        (other / "config.json").write_text(config % (size, "bfloat16"))
        assert codes(model, other) == ["companion-differs"]


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
