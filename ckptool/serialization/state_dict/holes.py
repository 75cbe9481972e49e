"""Pickles with holes: values that cannot be computed with, in place of numbers and texts."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from ckptool.serialization.archive.templates import Hole

_HOLE = pickle.BYTEARRAY8 + (4).to_bytes(8, "little")
"""The opcode prefix of a number as a bytearray of four bytes, which is no key, text or size."""


class Literal(Struct, frozen=True):
    """A complete number or text of a pickle, whose opcode is at ``opcode``."""

    opcode: int
    hole: Hole

    @property
    def start(self) -> int:
        """The place of its first byte."""
        return self.hole.at

    @property
    def end(self) -> int:
        """The place behind its last byte."""
        return self.hole.at + self.hole.nbytes


def find_literals(data: bytes, places: Sequence[int]) -> tuple[Literal, ...] | None:
    """Return the numbers and texts at these bytes of a pickle; None if one is in neither."""
    positions = sorted({*places})
    literals: list[Literal] = []
    covered = 0
    try:
        for literal in _literals(data, positions[-1]):
            count = bisect_left(positions, literal.end) - bisect_left(positions, literal.start)
            if count:
                covered += count
                literals.append(literal)
    except ValueError:  # which Python's own tools do not follow
        return None
    return tuple(literals) if covered == len(positions) else None


def _literals(data: bytes, last: int) -> Iterator[Literal]:
    """Yield the numbers and texts of a pickle, up to a byte."""
    from pickletools import genops

    for opcode, value, at in genops(data):
        if at is None or at > last:
            return
        number = {"BININT1": (1, "B"), "BININT2": (2, "H"), "BININT": (4, "i")}.get(opcode.name)
        if number is not None:
            yield Literal(at, Hole(at + 1, *number))
        elif opcode.name in ("BINUNICODE", "SHORT_BINUNICODE") and value:
            start = at + (5 if opcode.name == "BINUNICODE" else 2)
            nbytes = len(value.encode("utf-8", "surrogatepass"))
            yield Literal(at, Hole(start, nbytes, "s"))


def with_holes(data: bytes, literals: Sequence[Literal]) -> bytes:
    """Return a pickle with each literal replaced by a bytearray of its number."""
    pieces: list[bytes] = []
    done = 0
    for number, literal in enumerate(literals):
        pieces += data[done : literal.opcode], _HOLE, number.to_bytes(4, "little")
        done = literal.end
    return b"".join((*pieces, data[done:]))


def fill_holes(value: Any, values: Sequence[Any]) -> Any:
    """Return a part of a mesh with values in place of its holes."""
    if type(value) is bytearray:
        return values[int.from_bytes(value, "little")]
    if type(value) not in (list, tuple):
        return value
    return type(value)(fill_holes(part, values) for part in value)
