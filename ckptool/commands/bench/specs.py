"""Which tensors are saved: those of a model and its AdamW, by size or as in a checkpoint.

What the ranks are told to do, as the command writes it and they read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.bench.transfer.torch_tools import parameter_shapes
from ckptool.commands.open import open_checkpoint
from ckptool.core.catalog import Catalog
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.state_category import state_category
from ckptool.errors import Unsupported
from ckptool.storage.url import Location, location

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

    Raises what ``open_checkpoint`` raises, and Unsupported where it holds no tensor.
    """
    catalog = open_checkpoint(path).catalog
    model = _of_part(catalog, "model")
    optimizer = _of_part(catalog, "optimizer")
    if not model:
        raise Unsupported(f"{path}: no tensor of a model in it to take the shape of")
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
        if state_category(entry) == part
    }


def _plain(dtype: DType) -> str:
    """The element type to make tensors of; packed bits are as heavy as bytes."""
    return "uint8" if dtype.kind == "bits" else dtype.name


def total(specs: list[TensorSpec]) -> int:
    """Bytes of all tensors together."""
    return sum(spec.nbytes for spec in specs)


_LEAST_TIMEOUT = 240.0
_SLOWEST = 10e6
"""Bytes a second that are written at least, as long as nobody has measured it."""

_SLACK = 20
"""How many times as long as a raw write a save may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What the ranks are to do. ``scratch`` is theirs alone; ``temporary`` is their TMPDIR.

    ``store``: the URL that checkpoints are saved below; None to save them in ``scratch``.
    ``write_rate``: bytes a second that all ranks write together, where that is known.
    """

    specs: list[TensorSpec]
    strategies: list[str]
    saves: int
    abort: bool
    device_type: str
    scratch: str
    temporary: str
    store: str | None = None
    write_rate: float = _SLOWEST * _SLACK

    @staticmethod
    def read(path: Path) -> Task:
        """The task that ``write`` wrote."""
        told = json.loads(path.read_text("utf-8"))
        specs = [
            TensorSpec(tuple(spec["path"]), tuple(spec["shape"]), spec["dtype"])
            for spec in told["specs"]
        ]
        return Task(**{**told, "specs": specs})

    def write(self, path: Path) -> None:
        """For a process that is started with its path."""
        path.write_text(json.dumps(dataclasses.asdict(self)), "utf-8")

    @property
    def timeout(self) -> float:
        """Seconds that a save, or a talk of the ranks, may take before it is held for hung."""
        return _LEAST_TIMEOUT + _SLACK * total(self.specs) / self.write_rate

    def folder(self, job: str) -> Path:
        """Where a job of the ranks may write."""
        return Path(self.scratch) / job.replace("/", "_")

    def place(self, job: str) -> Location:
        """Where a job of the ranks saves."""
        if self.store is None:
            return self.folder(job)
        return location(self.store) / job.replace("/", "_")

    def log(self, job: str, rank: int) -> Path:
        """Where the words of a job's processes go."""
        return Path(self.scratch) / "logs" / f"{job.replace('/', '_')}-{rank}.log"
