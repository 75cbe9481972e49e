"""Small tensors that adjoin are looked at together, and reported one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify

COUNT = 3000


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1234, COUNT - 1])
def test_the_one_with_a_value_that_is_not_finite_is_named(
    value: float, which: int, tmp_path: Path
) -> None:
    names = [f"experts.{n:04d}.w" for n in range(COUNT)]
    state = {name: torch.ones(24, 16, dtype=torch.bfloat16) for name in names}
    state[names[which]][23, 15] = value
    save_file(state | {"z": torch.ones(3)}, tmp_path / "model.safetensors")
    report = verify(tmp_path / "model.safetensors", VerifyOptions())
    (found,) = [finding for finding in report.findings if finding.code == "not-finite"]
    assert found.tensor == names[which]
