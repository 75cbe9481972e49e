"""How many random trials a run makes, of what can be damaged or asked in millions of ways."""

from __future__ import annotations

import os

_TIMES = int(os.environ.get("CKPTOOL_TRIALS", "1"))
"""How many times as many as ``make test`` makes: 3 in CI's further suites, 25 by hand."""


def trials(count: int) -> int:
    """Return how many to make of ``count`` that ``make test`` makes, the same ones first."""
    return count * _TIMES
