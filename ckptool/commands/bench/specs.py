"""The tensors to save: those of a model and its AdamW, by size or as in a checkpoint."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct

from ckptool.commands.open import open_checkpoint
from ckptool.core.dtype import BY_NAME
from ckptool.core.state_category import state_category
from ckptool.errors import Unsupported
from ckptool.storage.url import Location

_LAYERS = 8
_STEP = 8
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TensorSpec(Struct, frozen=True):
    """A tensor to save: its path in the state dict, its shape, its element type's name."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize


def parameter_shapes(dim: int = 16) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a llama-like model, by name."""
    hidden, vocabulary = dim * 11 // 4, 32 * dim
    layer: dict[str, tuple[int, ...]] = {
        f"attention.{name}.weight": (dim, dim) for name in ("wq", "wk", "wv", "wo")
    }
    layer |= {f"feed_forward.{name}.weight": (hidden, dim) for name in ("w1", "w3")}
    layer |= {"feed_forward.w2.weight": (dim, hidden)}
    layer |= {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, dim)}
    for number in range(_LAYERS):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (dim,), "output.weight": (vocabulary, dim)}


def specs_of_size(nbytes: int) -> list[TensorSpec]:
    """Return a llama-like model in fp32 with AdamW's state: about ``nbytes``, by its width."""
    per_square = total(specs_of_width(256)) / 256**2
    return specs_of_width(max(_STEP, round((nbytes / per_square) ** 0.5 / _STEP) * _STEP))


def specs_of_width(width: int, dtype: str = "float32") -> list[TensorSpec]:
    """Return a llama-like model, its parameters of ``dtype``, with AdamW's state."""
    shapes = parameter_shapes(width)
    model = {name: TensorSpec(("model", name), shape, dtype) for name, shape in shapes.items()}
    return [*model.values(), *_adamw(model)]


def _adamw(model: dict[str, TensorSpec]) -> Iterator[TensorSpec]:
    """Yield AdamW's state of every parameter: two moments in fp32, and a step of its own."""
    for name, spec in model.items():
        head = ("optimizer", "state", name)
        yield from (TensorSpec((*head, key), spec.shape, "float32") for key in _MOMENTS)
        yield TensorSpec((*head, "step"), (), "float32")


def specs_like(path: Location) -> list[TensorSpec]:
    """Return the tensors of a checkpoint by its catalog, with AdamW's state if it has none.

    Raises the errors of ``open_checkpoint``, and Unsupported if it contains no model tensor.
    """
    specs: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for entry in open_checkpoint(path).catalog.tensors.values():
        category = state_category(entry)  # part of the path: else a tensor's own might clash
        dtype = "uint8" if entry.dtype.kind == "bits" else entry.dtype.name
        specs[category][entry.name] = TensorSpec((category, entry.name), entry.shape, dtype)
    model = specs["model"]
    if not model:
        raise Unsupported(f"{path}: no model tensors to take shapes from")
    optimizer = specs["optimizer"].values() or _adamw(model)
    return [*model.values(), *optimizer, *specs["other"].values()]


def total(specs: list[TensorSpec]) -> int:
    """Return the bytes of all tensors together."""
    return sum(spec.nbytes for spec in specs)
