"""What the README shows of Python runs as it stands there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import bits, case

import ckptool

README = Path(__file__).parents[2] / "README.md"
ZERO = case("deepspeed_zero_3")


def zeros(**options: Any) -> dict[str, torch.Tensor]:
    held = ckptool.open(ZERO.path, **options).tensors.items()
    return {n: torch.zeros(e.shape, dtype=getattr(torch, e.dtype.name)) for n, e in held}


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.read_text().partition("\n## In Python\n")[2].partition("\n## ")[0]
    (lines,) = re.findall(r"```python\n(.*?)```", section, re.S)
    shutil.copytree(ZERO.path, tmp_path / "runs" / "global_step1000")
    monkeypatch.chdir(tmp_path)
    parameters, everything = zeros(model_only=True), zeros()
    model = SimpleNamespace(state_dict=lambda: parameters)
    exec(lines, {"model": model, "state_dict": everything})
    truth = ckptool.open(ZERO.path, model_only=True)
    assert {n: bits(t) for n, t in parameters.items()} == {
        n: bits(truth.read(n)) for n in parameters
    }
    assert {n: bits(t) for n, t in everything.items()} == ZERO.truth
    assert ckptool.open("model/").tensors.keys() == parameters.keys()
