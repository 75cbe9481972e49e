"""Files of other pickle protocols, and of saves that failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import Damaged


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_legacy_stream_of_any_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    state = {"w": weight, "b": torch.ones(2, dtype=torch.bfloat16), "step": 3}
    torch.save(
        state,
        tmp_path / "a.pt",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=False,
    )
    found = ckptool.open(tmp_path / "a.pt")
    assert torch.equal(found.read("w"), weight)
    assert found.objects["step"] == 3
    assert ckptool.verify(tmp_path / "a.pt").ok


def test_a_save_that_failed_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"pickle|local object"):
        torch.save({"w": torch.ones(2), "f": lambda: 0}, tmp_path / "a.pt")
    with pytest.raises(Damaged, match=r"torch\.save failed before it wrote the object"):
        ckptool.open(tmp_path / "a.pt")
    codes = {finding.code for finding in ckptool.verify(tmp_path / "a.pt").findings}
    assert "save-incomplete" in codes
