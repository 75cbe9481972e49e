"""What a weight delta changes of a tensor's bytes: decoded from first to last, a little at a time.

Payloads are zstd frames, in which nothing can be addressed. A change keeps its place in one, and
goes on from there: what is asked of it may skip bytes, but not return.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ckptool.core.box import Box
from ckptool.core.catalog import Gather, TensorEntry
from ckptool.engine.read.numbers import Array
from ckptool.errors import Damaged

WINDOW = 2 << 20
"""Bytes of the largest window of a frame: a decoder holds that many. zstd's level 1 takes 512 KiB,
and levels up to 8 no more than this."""
DECODER = WINDOW + (1 << 20)
"""Bytes of memory that a decoder takes at most, with its buffers."""
_PIECE = 1 << 20
"""Bytes that are decoded at a time."""
_POSITION = np.dtype("<u4")
_POSITIONS = _PIECE // _POSITION.itemsize


class Change(Protocol):
    """The change of one tensor by one delta, which is asked of from first to last byte."""

    reached: int
    """The first byte of the tensor that can still be asked of."""

    def apply(self, gather: Gather, start: int, memory: Array) -> None:
        """Change bytes of the tensor, from ``start`` on, in ``memory``."""

    def finish(self, gather: Gather) -> None:
        """Raise Damaged if there is more than the changes of all bytes."""


class _Compressed:
    """The bytes of a payload as the file that a decoder reads, by what it was last given."""

    def __init__(self, payload: TensorEntry) -> None:
        self.gather: Gather | None = None
        self._payload, self._read = payload, 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, none at the end."""
        box = Box((self._read,), (min(self._read + size, self._payload.elements),))
        if self.gather is None or not box.volume:
            return b""
        self._read = box.hi[0]
        data: Array = self.gather(self._payload, box)
        return data.tobytes()


class _Decoded:
    """The decoded bytes of a payload, from first to last."""

    def __init__(self, payload: TensorEntry, what: str) -> None:
        from zstandard import ZstdDecompressor

        self._compressed, self._what = _Compressed(payload), what
        source: Any = self._compressed
        self._stream = ZstdDecompressor(max_window_size=WINDOW).stream_reader(source)

    def take(self, gather: Gather, count: int, dtype: np.dtype[np.unsignedinteger]) -> Array:
        """Return the next numbers, as many as there still are."""
        from zstandard import ZstdError

        self._compressed.gather = gather
        memory: Array = np.empty(count * dtype.itemsize, "u1")
        filled = 0
        try:
            while filled < memory.size and (more := self._stream.readinto(memory[filled:].data)):
                filled += more
        except ZstdError as error:
            raise Damaged(f"{self._what}: the zstd data is corrupt: {error}") from None
        return memory[: filled // dtype.itemsize * dtype.itemsize].view(dtype)

    def skip(self, gather: Gather, nbytes: int) -> None:
        """Pass over the next bytes, as many as there still are."""
        while nbytes and (done := self.take(gather, min(nbytes, _PIECE), np.dtype("u1")).size):
            nbytes -= done


class XorChange:
    """A change whose payload has, for each byte of the tensor, the bits that are others."""

    decoders = 1

    def __init__(self, payload: TensorEntry, nbytes: int, what: str) -> None:
        self.reached = 0
        self._nbytes, self._what = nbytes, what
        self._decoded = _Decoded(payload, what)

    def apply(self, gather: Gather, start: int, memory: Array) -> None:
        """Change bytes of the tensor, from ``start`` on; Damaged if the payload ends before."""
        self._decoded.skip(gather, start - self.reached)
        bits = self._decoded.take(gather, memory.size, np.dtype("u1"))
        if bits.size < memory.size:
            raise Damaged(
                f"{self._what}: decodes to less than the {self._nbytes:,} bytes of the tensor"
            )
        memory ^= bits
        self.reached = start + memory.size

    def finish(self, gather: Gather) -> None:
        """Raise Damaged if the payload has more bytes than the tensor."""
        if self._decoded.take(gather, 1, np.dtype("u1")).size:
            raise Damaged(
                f"{self._what}: decodes to more than the {self._nbytes:,} bytes of the tensor"
            )


class OverwriteChange:
    """A change whose payload has the positions of bytes, in order, and then their new values.

    A count of 32 bits is before them, and each position has 32 bits.
    """

    decoders = 2

    def __init__(self, payload: TensorEntry, nbytes: int, what: str) -> None:
        self.reached = 0
        self._nbytes, self._what, self._last = nbytes, what, -1
        self._count_left: int | None = None
        self._positions, self._values = _Decoded(payload, what), _Decoded(payload, what)
        self._at: Array = np.empty(0, _POSITION)
        self._new: Array = np.empty(0, "u1")

    def apply(self, gather: Gather, start: int, memory: Array) -> None:
        """Change bytes of the tensor, from ``start`` on; Damaged for positions out of order."""
        stop = start + memory.size
        while True:
            first, end = np.searchsorted(self._at, [start, stop])
            memory[self._at[first:end] - start] = self._new[first:end]
            self._at, self._new = self._at[end:], self._new[end:]
            if self._at.size or not self._read_more(gather):
                break
        self.reached = stop

    def finish(self, gather: Gather) -> None:
        """Raise Damaged if the payload has more than its count says."""
        while self._read_more(gather):  # only of a tensor without bytes: none is asked of
            pass
        if self._values.take(gather, 1, np.dtype("u1")).size:
            raise Damaged(f"{self._what}: decodes to more than its count of positions says")

    def _read_more(self, gather: Gather) -> bool:
        """Read the next positions and values; return whether there are any."""
        if self._count_left is None:
            self._begin(gather)
        count = min(self._count_left or 0, _POSITIONS)
        at = self._positions.take(gather, count, _POSITION)
        new = self._values.take(gather, count, np.dtype("u1"))
        if at.size < count or new.size < count:
            raise Damaged(f"{self._what}: ends before its last position and value")
        self._count_left = (self._count_left or 0) - count
        if not count:
            return False
        self._require_order(at)
        self._at, self._new, self._last = at.astype("i8"), new, int(at[-1])
        return True

    def _begin(self, gather: Gather) -> None:
        """Read the count, and go to the values."""
        count = self._positions.take(gather, 1, _POSITION)
        if not count.size:
            raise Damaged(f"{self._what}: ends before its count of positions")
        self._count_left = int(count[0])
        self._values.skip(gather, (self._count_left + 1) * _POSITION.itemsize)

    def _require_order(self, at: Array) -> None:
        """Raise Damaged if positions are not in order, come twice, or are beyond the tensor."""
        steps = np.diff(at.astype("i8"), prepend=self._last)
        wrong = np.flatnonzero(steps <= 0)
        if wrong.size:
            position = int(at[wrong[0]])
            raise Damaged(
                f"{self._what}: position {position:,} is after {position - int(steps[wrong[0]]):,}:"
                " twice, or out of order"
            )
        if int(at[-1]) >= self._nbytes:
            raise Damaged(
                f"{self._what}: position {int(at[-1]):,} is beyond the {self._nbytes:,} bytes of"
                " the tensor"
            )


CHANGES: Mapping[str, type[XorChange] | type[OverwriteChange]] = {
    "xor": XorChange,
    "overwrite": OverwriteChange,
}
"""How deltas encode changes."""
