"""Run by one torch: ``torch_side.py save FOLDER`` writes, ``torch_side.py load FOLDER`` reads back.

Alone in a process of another torch than the tests': it knows nothing of ckptool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def state() -> dict[str, dict[str, object]]:
    torch.manual_seed(7)
    model = {str(kind).removeprefix("torch."): (torch.randn(6, 5) * 9).to(kind) for kind in TYPES}
    return {
        "model": {**model, "row": torch.arange(12.0).reshape(3, 4)[1], "scalar": torch.tensor(3.5)},
        "progress": {"step": 7, "name": "run", "sizes": [1, 2, 3]},
    }


def save(folder: Path) -> None:
    dcp.save(state(), checkpoint_id=folder / "dcp")
    torch.save(state(), folder / "zip.pt")
    torch.save(state(), folder / "legacy.pt", _use_new_zipfile_serialization=False)


def load(folder: Path) -> None:
    expected = state()
    require_equal(torch.load(folder / "torch-save.pt", weights_only=True), expected)
    found = state()
    for tensor in found["model"].values():
        tensor.zero_()  # type: ignore[attr-defined]
    dcp.load(found, checkpoint_id=folder / "from-zip")
    require_equal(found, expected)


def require_equal(found: dict[str, dict[str, object]], expected: object) -> None:
    assert isinstance(expected, dict)
    assert found["progress"] == expected["progress"]
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        other = found["model"][name]
        assert isinstance(other, torch.Tensor)
        assert other.dtype == tensor.dtype, name
        assert torch.equal(other, tensor), name


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
