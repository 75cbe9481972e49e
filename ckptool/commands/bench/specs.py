"""Which tensors are saved: those of a model and its AdamW, by size or as in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckptool.commands.bench_torch import parameter_shapes
from ckptool.commands.open import open_checkpoint
from ckptool.core.catalog import Catalog
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.parts import part_of
from ckptool.engine.remote_path import Location
from ckptool.errors import CannotDo

_STEP = 8
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to save: where it lies in the state dict, its shape, its element type's name."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize


def by_size(nbytes: int) -> list[TensorSpec]:
    """A llama-like model in fp32 with AdamW's state: about ``nbytes``, by its width."""
    per_square = total(_of_width(256)) / 256**2
    return list(_of_width(max(_STEP, round((nbytes / per_square) ** 0.5 / _STEP) * _STEP)))


def _of_width(width: int) -> list[TensorSpec]:
    shapes = parameter_shapes(width)
    model = {name: TensorSpec(("model", name), shape, "float32") for name, shape in shapes.items()}
    return [*model.values(), *_adamw(model)]


def _adamw(model: dict[str, TensorSpec]) -> Iterator[TensorSpec]:
    """AdamW's state of every parameter: two moments in fp32, and a step of its own."""
    for name, spec in model.items():
        head = ("optimizer", "state", name)
        yield from (TensorSpec((*head, key), spec.shape, "float32") for key in _MOMENTS)
        yield TensorSpec((*head, "step"), (), "float32")


def as_in(path: Location) -> list[TensorSpec]:
    """The tensors of a checkpoint by its catalog; AdamW's state too where it has none.

    Raises what ``open_checkpoint`` raises, and CannotDo where it holds no tensor.
    """
    catalog = open_checkpoint(path).catalog
    model = _of_part(catalog, "model")
    optimizer = _of_part(catalog, "optimizer")
    if not model:
        raise CannotDo(f"{path}: no tensor of a model in it to take the shape of")
    return [
        *model.values(),
        *(optimizer.values() or _adamw(model)),
        *_of_part(catalog, "other").values(),
    ]


def _of_part(catalog: Catalog, part: str) -> dict[str, TensorSpec]:
    """Tensors by name, each under its part: their own steps might clash with one another."""
    return {
        entry.name: TensorSpec((part, entry.name), entry.shape, _plain(entry.dtype))
        for entry in catalog.tensors.values()
        if part_of(entry) == part
    }


def _plain(dtype: DType) -> str:
    """The element type to make tensors of; packed bits are as heavy as bytes."""
    return "uint8" if dtype.kind == "bits" else dtype.name


def total(specs: list[TensorSpec]) -> int:
    """Bytes of all tensors together."""
    return sum(spec.nbytes for spec in specs)
