"""Values that cannot or must not be read: one that runs code, and one that contradicts itself."""

from __future__ import annotations

import os
from typing import Any

import torch

from ckptool.errors import CkptoolError, Damaged, Hostile


class Trap:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch EXECUTED",)


class Contradiction:
    """A tensor whose strides leave its storage."""

    def __reduce__(self) -> Any:
        storage = torch.ones(2).untyped_storage()
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float, _internal=True)
        return torch._utils._rebuild_tensor_v2, (typed, 0, (9,), (1,), False, {})


MODEL = {"layer.weight": torch.arange(6.0).reshape(2, 3)}
REFUSED: dict[str, tuple[Any, type[CkptoolError], str]] = {
    "hostile": ({"callback": Trap()}, Hostile, "hostile-global"),
    "hostile in a list": ([{"a": 1}, {"b": [Trap()]}], Hostile, "hostile-global"),
    "damaged": ({"exp_avg": Contradiction()}, Damaged, "storage-mismatch"),
}
