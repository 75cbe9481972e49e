"""The README's Python runs as written, and what it names to set all up is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import bits, case

import ckptool

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CACHE = ROOT / ".mypy_cache"
DEMO = ROOT / "fixtures" / "demo.py"
PYTHON = ROOT / "ckptool" / "docs" / "python.md"
ZERO = case("deepspeed_zero_3")


def test_it_is_short_and_names_the_commands_that_set_all_up() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    targets = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"^\$ make (\w+) +# .*(?:minute|hour)", text, re.M)
    assert named == ["demo", "test"]
    assert {*named} <= {*targets}


def test_the_demo_shows_every_command() -> None:
    table = re.findall(r"^\| `ckptool (\w+)", README.read_text(), re.M)
    shown = re.findall(r'command\(\s*f?"(?:torchrun .* -m )?ckptool (\w+)', DEMO.read_text())
    assert len(table) == 9
    assert {*table} == {*shown}


def zeros(**options: Any) -> dict[str, torch.Tensor]:
    held = ckptool.open(ZERO.path, **options).tensors.items()
    return {n: torch.zeros(e.shape, dtype=getattr(torch, e.dtype.name)) for n, e in held}


def program(page: Path) -> str:
    """The Python of a page, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))


NAMES = """
import torch
from typing import Any
def make_model() -> torch.nn.Module: return torch.nn.Linear(1, 1)
model = make_model()
state_dict: dict[str, Any] = {}
"""
"""The names that a page's programs assume, for a type checker."""


def test_a_type_checker_reads_them(tmp_path: Path) -> None:
    for page in (README, PYTHON):
        lines = program(page).replace("dcp.load(", "getattr(dcp, 'load')(")  # not exported for mypy
        (tmp_path / f"{page.stem.lower()}.py").write_text(NAMES + lines)
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(CACHE)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *config, *map(str, tmp_path.glob("*.py"))],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "Success: no issues found in 2 source files\n", done.stdout + done.stderr


def make_model() -> torch.nn.Module:
    """Make a module of parameters with the names of the checkpoint, on torch's default device."""
    top = torch.nn.Module()
    for name, entry in ckptool.open(ZERO.path, model_only=True).tensors.items():
        *outer, last = name.split(".")
        module = top
        for step in outer:
            if step not in dict(module.named_children()):
                module.add_module(step, torch.nn.Module())
            module = dict(module.named_children())[step]
        value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
        module.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))
    return top


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize(
    "lines",
    [program(README), program(PYTHON).replace('as_="numpy"', 'as_="torch"')],
    ids=["README", "python.md"],
)
def test_in_python(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ckptool.open(" in lines
    shutil.copytree(ZERO.path, tmp_path / "runs" / "global_step1000")
    monkeypatch.chdir(tmp_path)
    parameters, everything = zeros(model_only=True), zeros()
    model = SimpleNamespace(state_dict=lambda: parameters)
    names: dict[str, Any] = {"model": model, "state_dict": everything, "make_model": make_model}
    exec(lines, names)
    truth = ckptool.open(ZERO.path, model_only=True)
    assert {n: bits(t) for n, t in parameters.items()} == {
        n: bits(truth.read(n)) for n in parameters
    }
    assert {n: bits(t) for n, t in everything.items()} == ZERO.truth
    assert ckptool.open("model/").tensors.keys() == parameters.keys()
    if names["model"] is not model:
        loaded = names["model"].state_dict()
        assert {n: bits(t) for n, t in loaded.items()} == {n: bits(truth.read(n)) for n in truth}
