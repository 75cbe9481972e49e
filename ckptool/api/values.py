"""Values besides tensors, as Python objects: only what is plain data is rebuilt."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from ckptool.core.catalog import ObjectEntry
from ckptool.core.layout import Literal
from ckptool.errors import CannotDo
from ckptool.formats._torch_write import torch_archive
from ckptool.formats._values import NUMPY, foreign_globals, type_name

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def archived(entry: ObjectEntry) -> bytes:
    """What torch.save would write of a value; CannotDo where it is no plain data.

    Plain is what ``torch.load(weights_only=True)`` rebuilds, and what numpy holds.
    """
    foreign = foreign_globals(entry.value) - {NUMPY}
    if foreign:
        raise CannotDo(
            f"{entry.name}: a {type_name(entry.value)}, made of {', '.join(sorted(foreign))}, which"
            " ckptool does not rebuild",
            hint="leave it out of the state dict, or drop it where the checkpoint is opened",
        )
    parts = torch_archive(entry.value)
    return b"".join(part.data for part in parts if isinstance(part, Literal))


def rebuilt(entry: ObjectEntry) -> Any:
    """The value as a Python object; CannotDo where it is no plain data, but numpy's arrays."""
    if isinstance(entry.value, _SIMPLE):
        return entry.value
    if foreign_globals(entry.value) != {NUMPY}:
        return _loaded(entry)
    from ckptool.api.numpy_values import python_value

    def plain(part: Any) -> Any:
        return _loaded(replace(entry, value=part))

    try:
        return python_value(entry.value, plain)
    except CannotDo as error:
        raise error.within(entry.name) from None


def _loaded(entry: ObjectEntry) -> Any:
    import torch

    return torch.load(io.BytesIO(archived(entry)), weights_only=True)
