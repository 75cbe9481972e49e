"""State that each rank has for itself: positions in the data, random states, of all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import gcd

from ckptool.commands.open import Survey
from ckptool.core.catalog import Catalog
from ckptool.core.text import list_some, plural
from ckptool.errors import Problem
from ckptool.formats.companions import TRAINER_STATE, loader_ranks
from ckptool.serialization.source import find_missing_ranks

_RANDOM = re.compile(r"rng_state_(\d{1,6})\.pth")
"""The name of a rank's random states (transformers 4.20 to 5.24); of one process, no number."""
_FEW = 4


def rank_problems(surveyed: Survey, catalog: Catalog) -> Iterator[Problem]:
    """Yield what is there of some ranks only, without which the others begin anew or end.

    Nodes of a cluster may each have the random states of their own ranks, and replicas of torchft
    the positions of theirs, without a model.
    """
    loaders, degree = loader_ranks(catalog.objects)
    if loaders and catalog.tensors and (missing := find_missing_ranks(loaders, degree)):
        names = [f"dataloader.dp_rank_{rank}" for rank in missing]
        message = f"{list_some(names, _FEW)}: missing, of {plural(degree, 'data-parallel rank')}"
        yield Problem(message, "rank-missing", tensor=names[0])
    files = surveyed.source.files
    random = sorted(int(m[1]) for m in map(_RANDOM.fullmatch, files) if m)
    if TRAINER_STATE in files and not _are_of_a_node(random):
        distances = (after - before for before, after in pairwise(random))
        inside = sorted(set(range(random[0], random[-1], gcd(*distances))).difference(random))
        names = [f"rng_state_{rank}.pth" for rank in inside]
        message = f"{list_some(names, _FEW)}: missing, of ranks up to {random[-1]}"
        yield Problem(message, "rank-missing", file=names[0])


def _are_of_a_node(ranks: Sequence[int]) -> bool:
    """Return whether ranks are all that one node may have: dealt out one by one, or in blocks.

    Then blocks are of one length, at one distance, and those of other nodes fill what is between.
    """
    numbered = groupby(enumerate(ranks), lambda each: each[1] - each[0])
    blocks = [[rank for _, rank in block] for _, block in numbered]
    lengths = {len(block) for block in blocks}
    distances = {after[0] - before[0] for before, after in pairwise(blocks)}
    is_even = len(lengths) < 2 and len(distances) < 2
    return is_even and all(distance % length == 0 for distance in distances for length in lengths)
