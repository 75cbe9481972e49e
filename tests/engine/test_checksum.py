"""CRC-32 in pieces, against zlib over the whole."""

from __future__ import annotations

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptool.engine.checksum import crc32, joined


@st.composite
def split(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Bytes, and their pieces ``(offset, nbytes, crc)`` in any order."""
    data = draw(st.binary(max_size=200))
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=6)) | {0, len(data)})
    pieces = [(a, b - a, crc32(data[a:b])) for a, b in pairwise(cuts)]
    return data, draw(st.permutations(pieces))


@given(split())
def test_joined_pieces_are_the_whole(found: tuple[bytes, list[tuple[int, int, int]]]) -> None:
    data, pieces = found
    assert joined(pieces) == zlib.crc32(data)
