"""Small tensors that adjoin are looked at together, and reported one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.core.chunks import WholeTensor
from ckptool.serialization.safetensors_header import read_entries

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


@pytest.mark.parametrize("cut", [0, 1])
def test_a_header_is_parsed_once_unless_something_is_wrong_with_it(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parsed = tmp_path / "model.safetensors", list[str]()
    save_file({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[: -cut or None])

    def count(text: bytes, file: str, *rest: Any) -> Any:
        parsed.append(file)
        return read_entries(text, file, *rest)

    monkeypatch.setattr("ckptool.serialization.safetensors.read_entries", count)
    assert verify(path, VerifyOptions()).ok is not bool(cut)
    assert (len(parsed) == 1) is not bool(cut)
