"""What one model-parallel rank holds, before tensor-parallel and pipeline ranks are merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path, flat_name
from ckptool.core.dtype import DType
from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_read import Vector
from ckptool.formats._leaves import Leaf, PlainLeaf

Name = tuple[str, str]
"""A kind (``fp32``, ``exp_avg``, ``module``, ...) and a parameter."""


@dataclass(slots=True)
class Local:
    """One rank's tensor, in its own coordinates."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(slots=True)
class Holding:
    """What the files of one model-parallel rank hold.

    ``leaves`` are values and tensors that every rank holds alike, by rank and flat name.
    """

    tensors: dict[Name, Local] = field(default_factory=dict)
    leaves: dict[int, dict[str, Leaf]] = field(default_factory=dict)

    def add(self, name: Name, dtype: DType, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
        """Add chunks of a tensor. Damaged where another file gives it another type or shape."""
        local = self.tensors.setdefault(name, Local(dtype, shape))
        if (local.dtype, local.shape) != (dtype, shape):
            raise Damaged(
                Problem(
                    f"{'.'.join(name)}: {local.dtype} {list(local.shape)} in one file,"
                    f" {dtype} {list(shape)} in another",
                    "ranks-disagree",
                )
            )
        local.chunks += chunks

    def add_whole(self, name: Name, vector: Vector, rank: int) -> None:
        """Add a tensor that one file holds whole."""
        box = Box.whole(vector.shape)
        self.add(name, vector.dtype, vector.shape, [Chunk(box, vector.at, rank)])

    def add_leaf(self, path: Path, value: Any, rank: int, *, rank_state: bool = False) -> None:
        """Add a value, or a ``Vector``, that other ranks may hold as well."""
        if isinstance(value, Vector):
            value = PlainLeaf(value.at, value.tensor)
        self.leaves.setdefault(rank, {})[flat_name(path)] = Leaf(path, value, rank_state)

    def add_leaves(self, leaves: Mapping[str, Leaf], rank: int) -> None:
        """Add values that are leaves already."""
        self.leaves.setdefault(rank, {}).update(leaves)
