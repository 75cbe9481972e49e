"""Device meshes and the placements of tensors on them, as in torch's DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from ckptool.errors import Damaged


class Shard(Struct, frozen=True):
    """Tensor dim ``dim`` is cut by ``torch.chunk``: rows ``r*c .. (r+1)*c`` with c = ceil(n/k)."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


class StridedShard(Struct, frozen=True):
    """torch's ``_StridedShard``: one chunk out of each of ``split_factor`` chunks of ``dim``."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"StridedShard({self.dim}, {self.split_factor})"


class Replicate(Struct, frozen=True):
    """Every coordinate of the mesh dim holds the same values."""

    def __str__(self) -> str:
        return "Replicate()"


class Partial(Struct, frozen=True):
    """Every coordinate of the mesh dim holds one addend; ``reduce_op`` would give the tensor."""

    reduce_op: str

    def __str__(self) -> str:
        return f"Partial({self.reduce_op})"


Placement = Shard | StridedShard | Replicate | Partial
Placements = tuple[Placement, ...]


class Mesh(Struct, frozen=True):
    """A grid of ranks, as torch's ``DeviceMesh``.

    ``ranks`` gives the global rank at each row-major position. It need not ascend, nor start at 0:
    a mesh may be permuted, or part of a larger one. Raises Damaged if the fields disagree.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise Damaged(f"mesh shape {self.shape} has a size below 1")
        if len(self.ranks) != self.size:
            raise Damaged(
                f"mesh shape {self.shape} has {self.size} positions for {len(self.ranks)} ranks"
            )
        if len(set(self.ranks)) != self.size:
            raise Damaged(f"mesh shape {self.shape} has a duplicate rank")
        if self.names is not None and len(self.names) != len(self.shape):
            raise Damaged(
                f"mesh shape {self.shape} does not match {len(self.names)} dim names {self.names}"
            )

    @property
    def words(self) -> str:
        """The dims as users read them: ``dp 2 x tp 4``, or ``2 x 4`` if they have no names."""
        names = self.names or ("",) * len(self.shape)
        return " x ".join(f"{n} {size}".strip() for n, size in zip(names, self.shape, strict=True))

    @classmethod
    def of(cls, shape: Sequence[int], names: Sequence[str] | None = None) -> Mesh:
        """Return the mesh of ``shape`` whose ranks count from 0 in row-major order."""
        return cls(
            tuple(shape), None if names is None else tuple(names), tuple(range(math.prod(shape)))
        )

    @property
    def size(self) -> int:
        """Number of positions."""
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the position of global ``rank``, one index per mesh dim; None if it is outside."""
        if rank not in self.ranks:
            return None
        return coordinate_of(self.ranks.index(rank), self.shape)


def coordinate_of(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major coordinates of ``position``."""
    at = []
    for size in reversed(shape):
        position, index = divmod(position, size)
        at.append(index)
    return tuple(reversed(at))
