"""What a thread keeps of what it read: decoded blobs, and boxes read wider than requested."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sized

import numpy as np

from ckptool.core.box import Box
from ckptool.core.catalog import EncodedBlob, TensorEntry
from ckptool.core.codec import Bytes, decode
from ckptool.engine.read.numbers import Array, part_of
from ckptool.errors import Damaged
from ckptool.storage.files import SPAN, FileReader

Read = Callable[[TensorEntry, Box], Array]


class Blobs:
    """Decodes blobs for one thread, and keeps the last one of each tensor that is read by turns.

    The reader's owner says which these are in ``by_turns``, by id. Of others, it keeps only the
    last blob of all.
    """

    def __init__(self, reader: FileReader, by_turns: Mapping[int, TensorEntry]) -> None:
        self._reader, self._by_turns = reader, by_turns
        self._kept: dict[int, tuple[EncodedBlob, Bytes]] = {}

    def decode(self, at: EncodedBlob, entry: TensorEntry | None) -> Bytes:
        """Return the decoded bytes of a tensor's blob; Damaged if they are not as written.

        The blob that it replaces is dropped before the bytes are read.
        """
        key = id(entry)  # another tensor may get it later: so the blob is compared, too
        if key not in self._kept or self._kept[key][0] != at:
            others = self._by_turns.keys() - {key} if key in self._by_turns else ()
            self._kept = {other: self._kept[other] for other in others if other in self._kept}
            self._kept[key] = at, self._decode(at)
        return self._kept[key][1]

    def _decode(self, at: EncodedBlob) -> Bytes:
        stored = bytearray(at.nbytes)
        self._reader.read_into(at.file, at.offset, memoryview(stored))
        what = f"{at.file} at byte {at.offset:,}"
        blob = decode(stored, at.codec, at.size, what=what)
        if len(blob) != at.size:
            raise Damaged(f"{what}: decodes to {len(blob):,} bytes, not {at.size:,}")
        _require_crc(at, blob, what)
        return blob


def _require_crc(at: EncodedBlob, blob: Bytes, what: str) -> None:
    """Raise Damaged if a decoded blob does not match its writer's checksum."""
    record = at.record
    if record is None:
        return
    crc = zlib.crc32(memoryview(blob)[record.offset : record.offset + record.nbytes])
    if crc != record.crc32:
        message = f"{what}: decodes to bytes of CRC-32 {crc:08x}, recorded {record.crc32:08x}"
        raise Damaged(message, "crc-mismatch", file=at.file)


class Windows:
    """Reads boxes of some columns of many rows, and more columns with them: all are passed over.

    From the second box of a tensor on, as many columns are kept as fit its share of SPAN: half of
    it, as of values and scales, or less if more tensors are read ``by_turns``.
    """

    def __init__(self, by_turns: Sized) -> None:
        self._by_turns = by_turns
        self._kept: dict[int, tuple[TensorEntry, Box, Array]] = {}

    def gather(self, read: Read, entry: TensorEntry, box: Box) -> Array:
        """Return a box of a whole tensor, with its elements as stored; it is read-only."""
        dim = _cut_dim(entry, box)
        if dim is None:
            return read(entry, box)
        window, most = self._kept.get(id(entry)), max(2, len(self._by_turns))
        if window is None or not window[1].contains(box):
            wide = box if window is None else _widen(entry, box, dim, SPAN // most)
            windows = [item for item in self._kept.values() if item[0] is not entry]
            window = entry, wide, read(entry, wide)
            self._kept = {id(item[0]): item for item in (*windows[1 - most :], window)}
        where = box.relative_to(window[1].lo)
        return np.ascontiguousarray(part_of(window[2], where))


def _cut_dim(entry: TensorEntry, box: Box) -> int | None:
    """Return the last dim of which a box has only a part; None unless the box has several rows."""
    cut = [d for d, n in enumerate(box.shape) if n < entry.shape[d]]
    has_rows = bool(cut) and math.prod(box.shape[: cut[-1]]) > 1
    return cut[-1] if has_rows else None


def _widen(entry: TensorEntry, box: Box, dim: int, most: int) -> Box:
    """Return a box that goes on along a dim until it has so many bytes."""
    nbytes = box.volume // max(1, box.shape[dim]) * entry.source_dtype.itemsize
    stop = max(box.hi[dim], box.lo[dim] + most // max(1, nbytes))
    return Box(box.lo, (*box.hi[:dim], min(stop, entry.shape[dim]), *box.hi[dim + 1 :]))
