"""Tensors with the changes of weight deltas: bits, not numbers, so nothing is rounded."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from xxhash import xxh3_128

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.layout import tiles
from ckptool.engine.formulas.delta_changes import CHANGES, DECODER, Change
from ckptool.engine.read.numbers import Array, part_of
from ckptool.engine.read.rounding import cast
from ckptool.errors import Damaged, Unsupported

_SPAN = 1 << 20
"""Bytes of a tensor that are changed at a time."""


class Hasher(Protocol):
    """Makes a checksum of bytes piece by piece."""

    def update(self, data: memoryview, /) -> object:
        """Add the next bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes."""


class _Adler32:
    """Adler-32 in the form of the other checksums."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum of all bytes."""
        return f"{self._value:08x}"


def _blake3() -> Any:
    try:
        from blake3 import blake3
    except ImportError:
        message = "the checksums of the deltas are of BLAKE3, for which a package is missing"
        raise Unsupported(message, hint="pip install blake3") from None
    return blake3()


CHECKSUMS: Mapping[str, Callable[[], Hasher]] = {
    "xxh3-128": xxh3_128,
    "blake3": _blake3,
    "adler32": _Adler32,
}
"""The checksums that deltas have of tensors."""


class Step(Struct, frozen=True):
    """How a delta changes one tensor: its encoding, and the ``digest`` of all bytes after it.

    ``what`` is what errors call it.
    """

    encoding: str
    checksum: str
    digest: str
    what: str


class KeptChanges(threading.local):
    """The box that a thread computed last, and how far the changes of its tensor have been applied.

    The next box mostly follows it, or is the same box in another type.
    """

    owner: object = None
    changes: Sequence[Change] = ()
    result: tuple[object, Box, Array] | None = None
    """The last box: the ``ChangedBits`` that computed it, the box, its bits."""


class ChangedBits:
    """The bits of a tensor after the changes of deltas, the last of what is stored.

    All bytes of the tensor are computed once, in order, before any is given away: each step must
    have the checksum that its writer recorded. Then boxes are computed in any order; changes that
    have passed a box begin anew.
    """

    def __init__(self, steps: Sequence[Step], cache: KeptChanges) -> None:
        self._steps, self._cache = steps, cache
        self._lock, self._is_checked = threading.Lock(), False

    @property
    def memory(self) -> int:
        """The bytes of memory that a thread's decoders take."""
        return DECODER * sum(CHANGES[step.encoding].decoders for step in self._steps)

    def __call__(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Compute a box of the changed tensor, as bits of a type."""
        self._require_recorded(gather, at)
        result = self._cache.result
        if result is None or result[:2] != (self, box):
            result = self._cache.result = self, box, self._compute(gather, at, box)
        return cast(result[2], at.stored[0].source_dtype, dtype)

    def _compute(self, gather: Gather, at: Computed, box: Box) -> Array:
        """Return the stored bits of a box of the changed tensor."""
        base = at.stored[0]
        bits: Array = gather(base, box)
        result = np.empty_like(bits)
        strides = row_major_strides(base.shape, bits.itemsize)
        memory: Array = np.empty(max(_SPAN, bits.itemsize), "u1")
        for tile, part in _tiles_around(box, base.shape, bits.itemsize):
            first = sum(i * stride for i, stride in zip(tile.lo, strides, strict=True))
            data = memory[: tile.volume * bits.itemsize]
            values = data.view(bits.dtype).reshape(tile.shape)
            in_tile, in_box = part.relative_to(tile.lo), part.relative_to(box.lo)
            part_of(values, in_tile)[...] = part_of(bits, in_box)
            for change in self._changes_from(first, at):
                change.apply(gather, first, data)
            part_of(result, in_box)[...] = part_of(values, in_tile)
        return result

    def _changes_from(self, first: int, at: Computed) -> Sequence[Change]:
        """Return the changes of the tensor, which have not passed its byte ``first``."""
        cache = self._cache
        if cache.owner is not self or any(change.reached > first for change in cache.changes):
            cache.changes = ()  # two at once would take twice the memory
            cache.owner, cache.changes = self, self._begin(at)
        return cache.changes

    def _begin(self, at: Computed) -> list[Change]:
        base, *payloads = at.stored
        nbytes = _nbytes(base)
        return [
            CHANGES[step.encoding](payload, nbytes, step.what)
            for step, payload in zip(self._steps, payloads, strict=True)
        ]

    def _require_recorded(self, gather: Gather, at: Computed) -> None:
        """Raise Damaged unless each step has the bytes that its writer had; once for all boxes."""
        with self._lock:
            if not self._is_checked:
                # what is kept of another tensor would add to the memory of the check's decoders
                self._cache.owner, self._cache.changes = None, ()
                self._check(gather, at)
                self._is_checked = True

    def _check(self, gather: Gather, at: Computed) -> None:
        base, changes, first = at.stored[0], self._begin(at), 0
        hashers = [CHECKSUMS[step.checksum]() for step in self._steps]
        for box in tiles(Box.whole(base.shape), base.source_dtype.itemsize, _SPAN):
            data = gather(base, box).reshape(-1).view("u1").copy()
            for change, hasher in zip(changes, hashers, strict=True):
                change.apply(gather, first, data)
                hasher.update(data.data)
            first += data.size
        for step, change, hasher in zip(self._steps, changes, hashers, strict=True):
            change.finish(gather)
            if (digest := hasher.hexdigest()) != step.digest:
                raise Damaged(
                    f"{step.what}: after it the tensor has {step.checksum} {digest}, recorded"
                    f" {step.digest}",
                    tensor=base.name,
                    hint="it was made on other weights than those that it is applied to, or is"
                    " damaged",
                )


def box_and_share(at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
    """Yield that a box is computed of the same box of the base, and of a share of each payload."""
    base, *payloads = at.stored
    yield base, box
    size, strides = base.source_dtype.itemsize, row_major_strides(base.shape, 1)
    first = sum(i * stride for i, stride in zip(box.lo, strides, strict=True)) * size
    whole, last = max(1, _nbytes(base)), first + box.volume * size
    for payload in payloads:
        start, stop = (payload.elements * byte // whole for byte in (first, last))
        yield payload, Box((start,), (min(stop, payload.elements),))


def _nbytes(entry: TensorEntry) -> int:
    return entry.elements * entry.source_dtype.itemsize


def _tiles_around(box: Box, shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[Box, Box]]:
    """Yield tiles that are runs of the tensor's bytes, in order, and what each has of a box."""
    rows = Box((*box.lo[:1], *(0 for _ in shape[1:])), (*box.hi[:1], *shape[1:]))
    for tile in tiles(rows, itemsize, _SPAN):
        if (part := tile.intersect(box)) is not None:
            yield tile, part
