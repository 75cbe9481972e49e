"""Values besides tensors, as Python objects: only what is plain data is rebuilt."""

from __future__ import annotations

import io
from typing import Any

from ckptool.core.catalog import ObjectEntry
from ckptool.core.layout import Literal
from ckptool.errors import CannotDo
from ckptool.formats._torch_write import torch_archive
from ckptool.formats._values import foreign_globals, type_name

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def archived(entry: ObjectEntry) -> bytes:
    """What torch.save would write of a value; CannotDo where it is no plain data.

    Plain is what ``torch.load(weights_only=True)`` rebuilds: nothing else is ever rebuilt.
    """
    foreign = foreign_globals(entry.value)
    if foreign:
        raise CannotDo(
            f"{entry.name}: a {type_name(entry.value)}, made of {', '.join(sorted(foreign))}, which"
            " ckptool does not rebuild",
            hint="leave it out of the state dict, or drop it where the checkpoint is opened",
        )
    parts = torch_archive(entry.value)
    return b"".join(part.data for part in parts if isinstance(part, Literal))


def rebuilt(entry: ObjectEntry) -> Any:
    """The value as a Python object; CannotDo where it is no plain data."""
    if isinstance(entry.value, _SIMPLE):
        return entry.value
    import torch

    return torch.load(io.BytesIO(archived(entry)), weights_only=True)
