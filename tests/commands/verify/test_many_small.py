"""Small tensors that adjoin are looked at together, and reported one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.core.chunks import WholeTensor

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


def test_no_chunk_is_made_of_a_tensor_in_which_nothing_is_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred thousand that takes longer than reading them."""
    made: list[int] = []
    monkeypatch.setattr(WholeTensor, "make", lambda self, at: made.append(at))
    numbers = torch.Generator().manual_seed(0)
    state = {f"layers.{n}.w": torch.randn(16, 24, generator=numbers) for n in range(3)}
    save_file(state, tmp_path / "model.safetensors")
    assert verify(tmp_path / "model.safetensors", VerifyOptions()).nbytes == 3 * 16 * 24 * 4
    assert not made
