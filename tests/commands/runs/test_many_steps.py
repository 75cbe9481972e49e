"""A run of very many steps: what is looked at for each does not grow with those before it."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
import torch
from safetensors.torch import save_file

import ckptool


def test_a_step_is_not_compared_with_all_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 120
    for number in range(1, count + 1):
        (tmp_path / f"checkpoint-{number}").mkdir()
        save_file({"w": torch.ones(4)}, tmp_path / f"checkpoint-{number}" / "model.safetensors")
    compared, equal = [0], PurePath.__eq__

    def counted(one: PurePath, other: object) -> bool:
        compared[0] += 1
        return equal(one, other)

    monkeypatch.setattr(PurePath, "__eq__", counted)
    assert len(ckptool.list_steps(tmp_path).steps) == count
    assert compared[0] < count * count
