"""New rows of a vocabulary are what their rule says; those there were stay, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.errors import CkptoolError

Tensors = dict[str, torch.Tensor]


def model() -> Tensors:
    random = torch.Generator().manual_seed(5)
    return {
        "embed.weight": torch.randn(5001, 48, generator=random).bfloat16(),
        "head.weight": torch.randn(5001, 48, generator=random),
        "head.bias": torch.randn(5001, generator=random).half(),
        "layer.weight": torch.randn(48, 48, generator=random),
        "ids": torch.arange(9),
        "codes": torch.randn(9, 4, generator=random).to(torch.float8_e4m3fn),
    }


MODEL = model()
GROWN = ("embed.weight", "head.weight", "head.bias")
RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda rows: rows.double().mean(0).to(rows.dtype),
    "zeros": lambda rows: torch.zeros_like(rows[0]),
    "copied:17": lambda rows: rows[17],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(MODEL, tmp_path / "m.safetensors", {"format": "pt"})
    return tmp_path / "m.safetensors"


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", *map(str, words)])
    if isinstance(result.exception, CkptoolError):
        hints = getattr(result.exception, "__notes__", [])
        return result.exception.exit_code, " ".join([str(result.exception), *hints])
    return result.exit_code, " ".join(result.output.split())


def grown(rows: torch.Tensor, rule: str, count: int) -> torch.Tensor:
    new = RULES[rule](rows)
    return torch.cat([rows, new.expand(count - len(rows), *new.shape)])


@pytest.mark.parametrize("rule", RULES)
def test_new_rows_are_what_the_rule_says(rule: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    words = ("--rows", "embed=5120", "--rows", "head=5056", "--fill", rule)
    code, said = run(out, source, *words)
    assert code == 0, said
    assert f"1 tensor = m.safetensors and 119 rows of {rule}" in said
    found = load_file(out)
    for name, tensor in MODEL.items():
        count = 5120 if name == "embed.weight" else 5056
        wanted = grown(tensor, rule, count) if name in GROWN else tensor
        assert bits(found[name]) == bits(wanted), name


@pytest.mark.parametrize("rows", [{"embed": 5003}, ["embed=5003"], "embed=5003"])
def test_python_takes_names_and_counts(rows: Any, source: Path, tmp_path: Path) -> None:
    ckptool.merge(tmp_path / "o.safetensors", source, rows=rows, fill="zeros")
    assert load_file(tmp_path / "o.safetensors")["embed.weight"].shape == (5003, 48)


def test_a_cast_rounds_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    words = ("--rows", "head.weight=5002", "--fill", "mean", "--dtype", "bf16")
    code, said = run(out, source, *words)
    assert code == 0, said
    rows = MODEL["head.weight"]
    wanted = torch.cat([rows.bfloat16(), rows.double().mean(0).bfloat16()[None]])
    assert bits(load_file(out)["head.weight"]) == bits(wanted)


def test_a_recipe_takes_and_appends(source: Path, tmp_path: Path) -> None:
    other = {"head.weight": torch.ones(4000, 48)}
    save_file(other, tmp_path / "other.safetensors")
    (tmp_path / "merge.toml").write_text(
        "sources = ['m.safetensors']\nfill = 'copied:0'\n"
        "[take]\n'head.weight' = 'other.safetensors'\n[rows]\n'head.weight' = 4096\n"
    )
    code, said = run(tmp_path / "out.safetensors", "--recipe", tmp_path / "merge.toml")
    assert code == 0, said
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["head.weight"], torch.ones(4096, 48))
    assert bits(found["head.bias"]) == bits(MODEL["head.bias"])


def test_tied_tensors_grow_together(tmp_path: Path) -> None:
    weight = torch.randn(11, 4)
    torch.save({"embed": weight, "head": weight, "other": weight[0].clone()}, tmp_path / "m.pt")
    code, said = run(tmp_path / "out.pt", tmp_path / "m.pt", "--rows", "head=12", "--fill", "zeros")
    assert code == 4
    assert "embed and head are one tensor" in said
    words = ("--rows", "head=12", "--rows", "embed=12", "--fill", "zeros")
    code, said = run(tmp_path / "out.pt", tmp_path / "m.pt", *words)
    assert code == 0, said
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found["embed"], grown(weight, "zeros", 12))
    assert torch.equal(found["head"], found["embed"])


def test_a_config_of_the_former_size_is_not_kept(tmp_path: Path) -> None:
    source, assets = tmp_path / "model", tmp_path / "assets"
    tensors = {"model.embed_tokens.weight": torch.randn(16, 4)}
    for folder, size in ((source, 16), (assets, 20)):
        folder.mkdir()
        config = {"model_type": "llama", "vocab_size": size, "hidden_size": 4}
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    words = (tmp_path / "out", source, "--rows", "embed_tokens=20", "--fill", "mean")
    code, said = run(*words)
    assert code == 4
    assert "config.json does not match the tensors" in said
    assert "--hf-assets FOLDER" in said
    code, said = run(*words, "--hf-assets", assets)
    assert code == 0, said


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--rows", "embed=6000"), "--rows and --fill: one needs the other"),
        (("--fill", "mean"), "--rows and --fill: one needs the other"),
        (("--rows", "embed", "--fill", "mean"), "invalid --rows 'embed': expected NAME=COUNT"),
        (("--rows", "embed=many", "--fill", "mean"), "expected NAME=COUNT"),
        (("--rows", "embed=" + "9" * 5000, "--fill", "mean"), "expected NAME=COUNT"),
        (("--rows", "embed=6000", "--rows", "*=6001", "--fill", "zeros"), "both mean embed.weight"),
        (("--rows", "embed=6000", "--fill", "ones"), "invalid --fill 'ones'"),
        (("--rows", "embed=6000", "--fill", "copied:-1"), "invalid --fill 'copied:-1'"),
        (("--rows", "embed=6000", "--fill", "5"), "invalid --fill '5'"),
        (("--rows", "embed=6000", "--fill", "copied:5001"), "embed.weight has 5,001 rows, from 0"),
        (("--rows", "embed=5000", "--fill", "mean"), "embed.weight has 5,001 rows, not less"),
        (("--rows", "wembed=6000", "--fill", "mean"), "--rows 'wembed' matches none of"),
        (("--rows", "ids=10", "--fill", "zeros"), "ids (int64, [9]) has no rows of plain numbers"),
        (("--rows", "codes=10", "--fill", "zeros"), "has no rows of plain numbers"),
        (("{source}", "--average", "--rows", "ids=10", "--fill", "zeros"), "not with --average"),
        (("{source}", "--rows", "embed=6000", "--fill", "zeros"), "--rows: needs one SRC"),
    ],
)
def test_what_makes_no_rows_is_refused(
    source: Path, tmp_path: Path, words: tuple[str, ...], wanted: str
) -> None:
    code, said = run(
        tmp_path / "out.safetensors", source, *(word.format(source=source) for word in words)
    )
    assert code in (2, 4)
    assert wanted in said
    assert not (tmp_path / "out.safetensors").exists()
