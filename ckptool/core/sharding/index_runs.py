"""Index runs: which indices of one tensor dim the coordinates of a mesh hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

Runs = tuple[tuple[int, int], ...]
"""(start, length) of consecutive indices; the local indices are their concatenation."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dim cutting a tensor dim: each of ``factor`` chunks is cut in ``size``."""

    mesh_dim: int
    size: int
    factor: int


Cuts = tuple[Cut, ...]


def chunk_bounds(length: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Half-open row ranges when plain shards of ``sizes`` cut ``length`` rows one after another.

    Row-major over the chunk numbers, in the order of the cuts. An empty chunk is
    ``(length, length)``, where torch puts it.
    """
    bounds = [(0, length)]
    for size in sizes:
        bounds = [chunk for low, high in bounds for chunk in _chunk_ranges(low, high, size)]
    return tuple((low, high) if low < high else (length, length) for low, high in bounds)


def _chunk_ranges(low: int, high: int, count: int) -> list[tuple[int, int]]:
    step = -(-(high - low) // count)
    return [(min(low + step * i, high), min(low + step * (i + 1), high)) for i in range(count)]


@lru_cache(maxsize=128)
def runs_table(length: int, cuts: Cuts) -> tuple[Runs, ...]:
    """The index runs for every combination of chunk numbers, row-major in the order of the cuts."""
    table: list[Runs] = [whole(length)]
    for step in cuts:
        table = [part for runs in table for part in _split(runs, step)]
    return tuple(table)


def whole(length: int) -> Runs:
    """Return all indices of a dim of ``length``."""
    return ((0, length),) if length else ()


def table_index(cuts: Cuts, at: tuple[int, ...]) -> int:
    """Return the place in :func:`runs_table` of what mesh coordinate ``at`` holds."""
    index = 0
    for step in cuts:
        index = index * step.size + at[step.mesh_dim]
    return index


def _split(runs: Runs, step: Cut) -> Iterator[Runs]:
    """Yield the runs of each of the ``step.size`` chunks."""
    total = total_length(runs)
    groups = _chunks(total, min(step.factor, total))
    parts = list(_take(runs, (n for group in groups for n in _chunks(group, step.size))))
    for index in range(step.size):
        yield _joined(itertools.chain.from_iterable(parts[index :: step.size]))


def _chunks(length: int, count: int) -> list[int]:
    """Lengths of ``torch.chunk``, padded with zeros up to ``count``."""
    size = -(-length // count) if count else 0
    return [min(size, max(0, length - size * index)) for index in range(count)]


def _take(runs: Runs, lengths: Iterable[int]) -> Iterator[Runs]:
    """Consecutive parts of the index sequence, of the given lengths."""
    pending = list(reversed(runs))
    for length in lengths:
        part = []
        while length:
            start, size = pending.pop()
            taken = min(size, length)
            part.append((start, taken))
            if taken < size:
                pending.append((start + taken, size - taken))
            length -= taken
        yield tuple(part)


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the same sequence with adjacent runs merged."""
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


def total_length(runs: Runs) -> int:
    """Number of indices."""
    return sum(length for _, length in runs)


Span = tuple[int, int, int]
"""Global start, local start, length."""


def spans_of(runs: Runs) -> Iterator[Span]:
    """Yield each run with where it begins in the local tensor."""
    local = 0
    for start, length in runs:
        yield start, local, length
        local += length
