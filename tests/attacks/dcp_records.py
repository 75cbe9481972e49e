"""Records and pickles of hostile DCP metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attack_build as b

number, text, size, chunk = b.number, b.text, b.size, b.chunk


Make = Callable[[Path], Path]


BOMB = b"]" + b.put(1) + b"".join(b"0](" + b.get(i) * 2 + b"e" + b.put(i + 1) for i in range(1, 50))


def world(*members: int) -> bytes:
    return b.tup(*map(number, members))
