"""A piece of a pickle without the frames it is cut into.

From protocol 4 on, writers cut the opcodes into frames of about 64 KiB, wherever an object begins
(CPython 3.4 to 3.14: ``FRAME``, then its length in 8 bytes). So one of a thousand records has a
frame's beginning inside. Frames mean no value to the machine; in a window there are none.
"""

from __future__ import annotations

import pickle  # the names of its opcodes
from bisect import bisect_left
from typing import Any

_FRAME = pickle.FRAME[0]
_HEADER = 9
"""Bytes of FRAME and the length after it."""
_PADDING = 16
_LENGTHS = {ord("h"): 2, ord("j"): 5, ord("K"): 2, ord("M"): 3, ord("J"): 5, 0x8A: 2, 0x8C: 2}
"""The bytes of opcodes in a row that are longer than one."""
_COUNTED = (0x8A, 0x8C)
"""LONG1 and SHORT_BINUNICODE: as many more bytes follow as the second one says."""


class Window:
    """The bytes of a pickle from ``begin`` on, ``data``, without the opcodes that begin frames.

    ``bytes`` and ``words`` are the same as an array, and the 8 bytes from each offset on as an
    integer. Opcodes are read from offsets up to ``last``; after that ``data`` has zeros.
    """

    __slots__ = ("_begin", "_cuts", "_ends", "bytes", "data", "last", "words")

    def __init__(self, pickled: bytes, begin: int, size: int, frame_end: int) -> None:
        """Cut out ``size`` bytes; the frame at ``begin``, if it has one, ends at ``frame_end``."""
        import numpy as np

        stop = min(len(pickled), begin + size)
        pieces, self._begin, at = [], begin, begin
        self._cuts: list[int] = []
        self._ends = [frame_end]
        while at <= frame_end < stop - _HEADER and pickled[frame_end] == _FRAME:
            pieces.append(pickled[at:frame_end])
            self._cuts.append(frame_end - begin - _HEADER * len(self._cuts))
            at = frame_end + _HEADER
            frame_end = at + int.from_bytes(pickled[frame_end + 1 : at], "little")
            self._ends.append(frame_end)
        if at <= frame_end:
            stop = min(stop, frame_end)
        pieces.append(pickled[at:stop])
        self.last = sum(map(len, pieces))
        self.data = b"".join([*pieces, bytes(_PADDING)])
        self.bytes: Any = np.frombuffer(self.data, np.uint8)
        self.words: Any = np.ndarray((self.last + 9,), "<u8", self.data, strides=(1,))

    def place(self, offset: int) -> tuple[int, int]:
        """Return where in the pickle an offset is, and the end of the frame there."""
        passed = bisect_left(self._cuts, offset)
        return self._begin + offset + _HEADER * passed, self._ends[passed]

    def first_torn(self, starts: Any, behind: int) -> int:
        """Return the first of the rows at ``starts`` with a frame's beginning inside an opcode.

        To the machine that is none, but a part of the opcode's argument. The rows end before
        ``behind``.
        """
        import numpy as np

        at = 0
        for cut in self._cuts:
            if cut >= behind:
                break
            row = int(np.searchsorted(starts, cut, side="right")) - 1
            at = max(at, int(starts[row]))
            while at < cut:
                opcode = self.data[at]
                at += _LENGTHS.get(opcode, 1) + (self.data[at + 1] if opcode in _COUNTED else 0)
            if at > cut:
                return row
        return len(starts)
