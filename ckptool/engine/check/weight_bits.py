"""What a model's matrices look like, noted while they are read."""

from __future__ import annotations

import math
import threading

import numpy as np

from ckptool.core.dtype import DType
from ckptool.engine.check.fingerprint import head_in
from ckptool.engine.check.spans import Part
from ckptool.engine.read.numbers import decode

_CODES = {nbytes: np.dtype(f"u{nbytes}") for nbytes in (1, 2, 4, 8)}
_SAMPLE = 1 << 9
"""Elements of each run, all over it, of which denormal and different ones are counted."""
_SPREAD, _VARIED = 64, 32
"""Of so many of those so many are different, as of what training moves; scales, masks and ones have
few values."""
_FLOOD = 0.9
"""A share of denormal values, among those that are not zero, that no weights have."""
_ENOUGH = 32
_FULL = {
    "float32": (np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)),
    "bfloat16": (np.uint16(0x7FFF), np.uint16(0x7F80)),
}
"""The bits of all but the sign, and of the exponent, of types whose denormal numbers are too small
for weights; in float16 some changes are."""


class Weight:
    """Looks at one matrix: is it of one value, and are most of its values denormal?

    ``first`` is the code of all of the ``elements`` so far, None if they differ. ``head`` is the
    checksum of the first elements, None if these are stored in pieces. Values are as different as
    those of a weight that was trained if it ``is_varied``.
    """

    def __init__(self, dtype: DType) -> None:
        self.elements = 0
        self.first: int | None = None
        self.head: int | None = None
        self.is_varied = False
        self._dtype = dtype
        self._is_one, self._nonzero, self._denormal = True, 0, 0
        self._lock = threading.Lock()

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Look at elements of a part, the first of which is its ``first``-th."""
        dtype = self._dtype
        codes = np.frombuffer(data, _CODES[dtype.itemsize])
        value = codes.item(0)
        is_one = self._is_one and value == codes.item(-1)  # few get further
        is_one = is_one and self.first in (None, value) and not (codes != value).any()
        sample = codes[:: codes.size // _SAMPLE | 1]  # odd: of no column alone
        spread = sample[:: sample.size // _SPREAD | 1].tolist()
        is_varied = self.is_varied or len(set(spread)) >= _VARIED
        nonzero = denormal = 0
        if (bits := _FULL.get(dtype.name)) is not None:
            normal = int(np.count_nonzero(sample & bits[1]))
            # all are normal in most samples: zeros need not be looked for then
            nonzero = normal if normal == sample.size else int(np.count_nonzero(sample & bits[0]))
            denormal = nonzero - normal
        head = head_in(data, part, first)
        with self._lock:
            self.elements += codes.size
            self._is_one = is_one and self._is_one and self.first in (None, value)
            self.first = value if self._is_one else None
            self.is_varied = self.is_varied or is_varied
            self._nonzero, self._denormal = self._nonzero + nonzero, self._denormal + denormal
            self.head = self.head if head is None else head

    @property
    def oddity(self) -> tuple[str, str] | None:
        """What is odd of the matrix: the code of a finding, and words; None if nothing is."""
        if self.first is not None:
            bits = np.array([self.first], f"u{self._dtype.itemsize}")
            value = float(decode(bits, self._dtype)[0])
            if not math.isfinite(value):
                return None  # that has a finding of its own
            if value == 1:
                return None  # as norms and masks begin
            code = "weight-constant" if self.first else "weight-zero"
            return code, f"all values are {value:g}" if self.first else "all values are zero"
        if self._nonzero >= _ENOUGH and self._denormal > _FLOOD * self._nonzero:
            share = self._denormal / self._nonzero
            return "weight-denormal", f"{share:.0%} of the sampled values but zero are denormal"
        return None
