"""What one model-parallel rank holds, before tensor-parallel and pipeline ranks are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path, flat_name
from ckptool.core.dtype import DType
from ckptool.errors import Damaged, Problem, Refusal
from ckptool.formats._deepspeed_read import Vector
from ckptool.formats._leaves import Leaf, PlainLeaf
from ckptool.formats._refusing import Barred, refusal_in

MASTER = "fp32"
"""The kind of the weights that an optimizer keeps in full precision."""
_T = TypeVar("_T")
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
    ``notes`` say what is not carried, ``barred`` why masters and moments cannot be placed.
    """

    tensors: dict[Name, Local] = field(default_factory=dict)
    leaves: dict[int, dict[str, Leaf]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    barred: Refusal | None = None

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
        """Add a value, or a ``Vector``, that other ranks may hold as well.

        A value of which a part is refused is so under its own name.
        """
        why = refusal_in(value)
        if why is not None:
            value = why.derived_for(flat_name(path))
        elif isinstance(value, Vector):
            value = PlainLeaf(value.at, value.tensor)
        self.add_leaves({flat_name(path): Leaf(path, value, rank_state)}, rank)

    def add_leaves(self, leaves: Mapping[str, Leaf], rank: int) -> None:
        """Add values that are leaves already. What is refused once stays so."""
        held = self.leaves.setdefault(rank, {})
        for name, leaf in leaves.items():
            if name not in held or not isinstance(held[name].value, Refusal):
                held[name] = leaf

    def attempt(self, work: Callable[[Holding], _T]) -> _T | None:
        """Add the masters and moments that ``work`` adds to a holding; return what it returns.

        Where they depend on a part that is refused, or are ``barred`` already, none are added.
        """
        more = Holding()
        try:
            found = None if self.barred is not None else work(more)
        except Barred as error:
            self.barred = error.refusal
            return None
        for name, local in more.tensors.items():
            self.add(name, local.dtype, local.shape, local.chunks)
        for rank, leaves in more.leaves.items():
            self.add_leaves(leaves, rank)
        self.notes += more.notes
        return found

    def refuse_masters(self, part: str) -> None:
        """Say why the masters and moments of this rank, which are of this ``part``, are barred."""
        if self.barred is not None:
            why = self.barred.derived_for(MASTER, "masters and moments are not placed: ")
            why.part = part
            self.add_leaves({MASTER: Leaf((MASTER,), why)}, 0)
