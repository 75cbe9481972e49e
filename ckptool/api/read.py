"""Read a part of a tensor into memory: a new tensor or array, or one that is given."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import parse_dtype
from ckptool.core.subscript import Pick
from ckptool.errors import Unsupported, UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ckptool.api.checkpoint import Checkpoint


def installed_library() -> Literal["torch", "numpy"]:
    """Return torch, or else numpy, with a warning."""
    try:
        import torch  # noqa: F401 (only whether it is there)
    except ImportError:
        warnings.warn(
            "torch is not installed: tensors are read as numpy arrays; as_='numpy' asks for them",
            stacklevel=3,
        )
        return "numpy"
    return "torch"


def read_torch(
    checkpoint: Checkpoint,
    entry: TensorEntry,
    picks: Sequence[Pick],
    device: Any,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Read into ``out``, or a new tensor on ``device``; Unsupported if ``out`` does not fit."""
    import torch

    from ckptool.api.tensors import Staging, torch_dtype, why_not_filled

    shape = _shape(picks)
    if out is None:
        out = torch.empty(shape, dtype=torch_dtype(entry.dtype.name), device=device)
    else:
        _require_kind(out, torch.Tensor, "a torch tensor, or an array with as_='numpy'")
        _require_fits(entry, shape, tuple(out.shape), str(out.dtype).removeprefix("torch."))
    obstacle = why_not_filled(out)
    if obstacle is not None:
        raise Unsupported(f"{entry.name}: cannot be read into what is {obstacle}")
    staging = Staging()
    try:
        checkpoint.fill_part(entry, picks, staging.memory(out))
    finally:
        staging.finish()
    return out


def read_numpy(
    checkpoint: Checkpoint,
    entry: TensorEntry,
    picks: Sequence[Pick],
    out: np.ndarray[Any, Any] | None,
) -> np.ndarray[Any, np.dtype[Any]]:
    """Read into ``out``, or a new array; Unsupported if numpy has no such element type."""
    import numpy as np

    from ckptool.engine.read.gather import unit
    from ckptool.engine.read.numbers import numpy_dtype
    from ckptool.engine.read.tensors import ArrayMemory

    shape = _shape(picks)
    try:
        dtype = numpy_dtype(entry.dtype.name)
    except KeyError:
        why = f"{entry.name}: numpy has no {entry.dtype}"
        raise Unsupported(why, hint="read it as torch") from None
    if out is None:
        out = np.empty(shape, dtype)
    else:
        _require_kind(out, np.ndarray, "a numpy array, or a tensor without as_='numpy'")
        kind = out.dtype.name if out.dtype.isnative else str(out.dtype)
        _require_fits(entry, shape, out.shape, kind)
    if not out.flags.writeable:
        raise Unsupported(f"{entry.name}: cannot be read into a read-only array")
    checkpoint.fill_part(entry, picks, ArrayMemory(out.view(unit(entry.dtype.itemsize))))
    return out


def _shape(picks: Sequence[Pick]) -> tuple[int, ...]:
    return tuple(len(pick.indexes) for pick in picks if not pick.is_one)


def _require_kind(out: object, kind: type, expected: str) -> None:
    if not isinstance(out, kind):
        raise UsageError(f"out is a {type(out).__module__}.{type(out).__name__}: give {expected}")


def _require_fits(
    entry: TensorEntry, shape: tuple[int, ...], sizes: tuple[int, ...], dtype: str
) -> None:
    """Raise Unsupported if memory of these sizes and type does not fit the shape that is read."""
    if (sizes, dtype) != (shape, entry.dtype.name):
        raise Unsupported(
            f"{entry.name}: {entry.dtype} {list(shape)} is read, but out is {dtype} {list(sizes)}",
            hint="nothing is cast silently: use dtype= to cast" if sizes == shape else None,
        )


def cast_entry(checkpoint: Checkpoint, name: str, dtype: object) -> TensorEntry:
    """Return a tensor to be read as ``dtype``; Unsupported if it is not to be cast to that."""
    entry = checkpoint.entry(name)
    text = str(dtype).removeprefix("torch.")
    target = entry.dtype if text == entry.dtype.name else parse_dtype(text)
    cast = checkpoint.entry(name, target)
    if cast.dtype != target:
        is_float = entry.dtype.kind == "float"
        why = "it is quantized, or a number such as a step counter" if is_float else "no float"
        raise Unsupported(f"{name}: {entry.dtype} is not cast to {target}: {why}")
    return cast
