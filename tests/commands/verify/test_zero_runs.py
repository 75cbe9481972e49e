"""Ranges of zeros that begin or end where ranks' parts of a tensor do."""

from __future__ import annotations

import numpy as np
import pytest

from ckptool.commands.verify.checks.meaning.zero_runs import (
    ZeroRange,
    zero_ranges,
    zeros_at_ends,
)
from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME


def entry(shape: tuple[int, ...], *parts: tuple[int | None, Box]) -> TensorEntry:
    at = Extent("f", 0, tuple(0 for _ in shape))
    chunks = tuple(Chunk(box, at, rank) for rank, box in parts)
    return TensorEntry("w", ("w",), BY_NAME["float32"], shape, chunks)


ROWS = entry(
    (10, 100),
    (0, Box((0, 0), (4, 100))),
    (0, Box((4, 0), (5, 30))),
    (1, Box((4, 30), (5, 100))),
    (1, Box((5, 0), (10, 100))),
)
"""Rank 0 has 430 elements, rank 1 the others: rows, and part of one."""
VECTOR = entry((1000,), (0, Box((0,), (500,))), (1, Box((500,), (1000,))))
WHOLE = entry((10, 100), (0, Box((0, 0), (10, 100))))
KERNELS = entry((50, 20), (0, Box((0, 0), (50, 20))))
COLUMNS = entry((10, 100), (0, Box((0, 0), (10, 50))), (1, Box((0, 50), (10, 100))))


@pytest.mark.parametrize(
    ("tensor", "runs", "found"),
    [
        (ROWS, [(390, 400), (400, 430)], [ZeroRange(390, 430, begins_at_border=False)]),
        (ROWS, [(430, 470)], [ZeroRange(430, 470, begins_at_border=True)]),
        (ROWS, [(950, 1000)], [ZeroRange(950, 1000, begins_at_border=False)]),
        (ROWS, [(0, 50)], [ZeroRange(0, 50, begins_at_border=True)]),
        (ROWS, [(300, 400), (400, 430), (430, 500)], []),  # whole rows, whoever has them
        (ROWS, [(350, 400)], []),  # one of a rank's own runs
        (ROWS, [(400, 430)], []),  # few
        (ROWS, [(0, 1000)], []),
        (VECTOR, [(460, 500)], [ZeroRange(460, 500, begins_at_border=False)]),
        (VECTOR, [(500, 600)], [ZeroRange(500, 600, begins_at_border=True)]),
        (VECTOR, [(900, 1000)], []),  # longer than what is used of it
        (VECTOR, [(450, 500), (500, 550)], []),
        (COLUMNS, [(0, 40)], []),
        (WHOLE, [(950, 1000)], [ZeroRange(950, 1000, False, is_of_ranks=False)]),
        (WHOLE, [(0, 350)], [ZeroRange(0, 350, True, is_of_ranks=False)]),
        (WHOLE, [(600, 650)], []),
        (KERNELS, [(910, 1000)], []),
    ],
)
def test_only_ranges_at_borders_of_ranks_are_found(
    tensor: TensorEntry, runs: list[tuple[int, int]], found: list[ZeroRange]
) -> None:
    assert list(zero_ranges(tensor, runs)) == found


def test_zeros_at_the_ends_of_a_run() -> None:
    assert zeros_at_ends(np.array([1, 0, 2])) == []
    assert zeros_at_ends(np.array([0, 0, 2, 0])) == [(0, 2), (3, 4)]
    assert zeros_at_ends(np.array([0, 0])) == [(0, 2)]
