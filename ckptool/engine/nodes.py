"""Which ranks write into one place: all of them, or those of a node that has a disk of its own."""

from __future__ import annotations

import os
from typing import NamedTuple

from ckptool.engine.ranks import Ranks
from ckptool.engine.write.output import Output
from ckptool.errors import TransferError


class Node(NamedTuple):
    """The ranks that write into the place that this one writes into, out of all ``places``."""

    rank: int
    ranks: tuple[int, ...]
    places: int

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that begins and commits."""
        return self.rank == self.ranks[0]

    @property
    def position(self) -> int:
        """The number of this rank among those of the node."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)


def begin(stage: Output, ranks: Ranks) -> Node:
    """Begin the output in each place that ranks write into: each will hold all of it.

    Raises as ``Output.begin`` does, TransferError where a rank sees none that was begun.
    """
    tokens = ranks.gather(os.urandom(8).hex())

    def begin_here(leads: bool) -> None:
        if leads:
            stage.begin()
            stage.mark(tokens[ranks.rank])

    ranks.together(lambda: begin_here(ranks.rank == 0))
    is_apart = not stage.is_marked(tokens[0])
    if any(ranks.gather(is_apart)):
        ranks.together(lambda: begin_here(is_apart and ranks.local_rank == 0))
    first = ranks.together(lambda: _first_of(stage, ranks, tokens))
    firsts = ranks.gather(first)
    mine = tuple(rank for rank, one in enumerate(firsts) if one == first)
    return Node(ranks.rank, mine, len(set(firsts)))


def _first_of(stage: Output, ranks: Ranks, tokens: list[str]) -> int:
    """The rank that began the output where this rank writes."""
    for rank, token in enumerate(tokens):
        if stage.is_marked(token):
            return rank
    raise TransferError(
        f"rank {ranks.rank} sees no output that a rank of its node began",
        hint="torchrun gives the first rank of each node LOCAL_RANK=0",
    )
