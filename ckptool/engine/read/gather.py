"""Fill an array with a box of a chunk, whatever the place and order of its bytes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from operator import mul
from typing import Any

import numpy as np

from ckptool.core.box import Box, contiguous
from ckptool.core.catalog import (
    Chunk,
    EncodedBlob,
    Extent,
    Place,
    ScaledBlocks,
    TensorEntry,
)
from ckptool.core.codec import decode
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.sharding.groups import Tile
from ckptool.core.sharding.index import ChunkIndex, SharedBox
from ckptool.engine.read.containers import open_place
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.rounding import cast, may_have_lost
from ckptool.engine.read.runs import span_of, worth_a_span
from ckptool.engine.read.strips import Strip, strip_of
from ckptool.engine.read.tiles import ByteReader
from ckptool.engine.read.window import Windows
from ckptool.errors import Damaged
from ckptool.storage.local import SPAN, Files

Array = np.ndarray[Any, np.dtype[Any]]


def unit(itemsize: int) -> np.dtype[Any]:
    """Return a numpy type of the same size, which copies bits and never looks at them."""
    return np.dtype(f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}")


def array(shape: tuple[int, ...], dtype: DType, buffer: memoryview) -> Array:
    """Return an uninitialized C-ordered array, which can be written, in ``buffer`` if it fits."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = buffer if 0 < nbytes <= len(buffer) else memoryview(bytearray(nbytes))
    return np.frombuffer(memory, "u1", nbytes).view(unit(dtype.itemsize)).reshape(shape)


def raw(values: Array) -> memoryview:
    """Return the bytes of a C-ordered array, without a copy."""
    return values.reshape(-1).view("u1").data


def part_of(values: Array, box: Box) -> Array:
    """Return a view of the elements of a box of an array."""
    inside: Any = (..., *map(slice, box.lo, box.hi))
    part: Array = values[inside]
    return part


def cut(values: Array, tile: Tile, buffer: memoryview) -> memoryview:
    """Return the bytes of a tile of a band, in ``buffer``; Damaged if its pieces do not fill it."""
    pieces, shape = tile.pieces, tile.shape
    if len(pieces) == 1 and (part := part_of(values, pieces[0].box)).flags.c_contiguous:
        filled, data = part.size, raw(part)
    else:
        out: Array = np.ndarray(shape, values.dtype, buffer)
        filled, data = 0, buffer[: out.nbytes]
        for box, local in pieces:
            part = part_of(values, box)
            target = part_of(out, local) if len(pieces) > 1 else out
            target[...] = part
            filled += part.size
    if filled != math.prod(shape):
        raise Damaged(f"{tile.entry.name}: {list(shape)} of a local tensor is not covered")
    return data


class Gatherer:
    """Reads boxes of chunks for one thread, keeping at most one decoded blob.

    It reads by the reader ``of_bytes``; ``beyond`` counts the numbers that a cast makes infinite.
    """

    def __init__(
        self, source: Files, of_bytes: ByteReader | None = None, beyond: RangeCheck | None = None
    ) -> None:
        self.tile = source.tile
        self._beyond = beyond
        self._bytes = of_bytes or ByteReader(source)
        self._note_piece = self._bytes.note
        self._reader = self._bytes.files
        self._block = source.block
        self._scratch = memoryview(bytearray(SPAN))
        self._blob: tuple[EncodedBlob, bytes] | None = None
        self._indexes: dict[int, tuple[TensorEntry, ChunkIndex]] = {}
        self._strip: Strip | None = None
        self._windows = Windows()

    def close(self) -> None:
        """Close all files."""
        self._bytes.close()

    def memory(self, nbytes: int) -> memoryview:
        """Return so many bytes of memory, which the next call may return again."""
        return self._bytes.memory(nbytes)

    def chunks(self, entry: TensorEntry, box: Box) -> Iterator[tuple[Chunk, SharedBox]]:
        """Yield each chunk of a tensor that overlaps a box, with the common part."""
        return self._index(entry).shared(box)

    def fill_from(self, at: Place, out: Array, local: Box, dtype: DType) -> None:
        """Copy the elements ``local`` of a chunk (in its own coordinates) into ``out``."""
        if isinstance(at, EncodedBlob):
            blob = self._decode(at)
            out[...] = _strided(blob, at.start, at.strides, local, dtype.itemsize)
            _repair(out, at.ops, dtype)
        elif isinstance(at, Extent):
            start = at.offset + sum(i * s for i, s in zip(local.lo, at.strides, strict=True))
            self._fill(out, at.file, start, at.strides)
            _repair(out, at.ops, dtype)
        elif isinstance(at, ScaledBlocks):
            from ckptool.engine.read.dequantize import fill_scaled

            gather = partial(self._windows.gather, self.gather)
            fill_scaled(gather, at, out, local, dtype)
        else:
            raise TypeError(f"{at} was never located")

    def gather(self, entry: TensorEntry, box: Box) -> Array:
        """Return a box of a whole tensor, with its elements as stored.

        The chunks must cover the box. Runs of checksummed records are noted.
        """
        values: Array = np.empty(box.shape, unit(entry.source_dtype.itemsize))
        self.gather_into(values, entry, box)
        return values

    def read_stored(self, entry: TensorEntry, box: Box) -> Array:
        """Return the same as ``gather``, in memory that the next call may reuse."""
        nbytes = box.volume * entry.source_dtype.itemsize
        values = array(box.shape, entry.source_dtype, self.memory(nbytes))
        self.gather_into(values, entry, box)
        return values

    def read_values(self, entry: TensorEntry, box: Box) -> Array:
        """Return the same as ``read_stored``, in the element type that a rewrite requests.

        Raises Unsupported if that needs torch and torch is missing.
        """
        stored, types = self.read_stored(entry, box), (entry.source_dtype, entry.dtype)
        made = cast(stored, *types)
        if self._beyond is not None and types[0] != types[1]:
            self._beyond.note(entry.name, stored, types[0], made, types[1])
        return made

    def gather_into(self, values: Array, entry: TensorEntry, box: Box) -> None:
        """Read the same as ``gather`` into an array of the box's shape."""
        strip = self._strip
        if strip is not None and strip.holds(entry, box) and values.flags.c_contiguous:
            strip.fill(values, box, self._reader, self._scratch, self._note_piece)
            return
        is_next = id(entry) in self._indexes
        some = list(self._index(entry).shared(box))
        self._strip = strip_of(entry, box, some) if is_next else None
        for chunk, shared in some:
            at = open_place(chunk.at, chunk.box.shape)
            view = values if shared.box == box else part_of(values, shared.where)
            if not self._fill_run(view, at, shared.local):
                self.fill_from(at, view, shared.local, entry.source_dtype)
            if self._beyond is not None and isinstance(at, ScaledBlocks):
                self._count_computed(self._beyond, entry, at, (view, shared.local))

    def _count_computed(
        self, beyond: RangeCheck, entry: TensorEntry, at: ScaledBlocks, made: tuple[Array, Box]
    ) -> None:
        """Count the computed numbers that exceed the range of their type."""
        values, local = made
        if not may_have_lost(values, entry.source_dtype):
            return
        wide = BY_NAME["float32"]
        numbers: Array = np.empty(values.shape, unit(wide.itemsize))
        self.fill_from(at, numbers, local, wide)
        beyond.note(entry.name, numbers, wide, values, entry.source_dtype)

    def _fill_run(self, out: Array, at: Place, local: Box) -> bool:
        """Read and note a single run of a file; return whether it is one."""
        if not isinstance(at, Extent) or at.ops or not out.size:
            return False
        if not contiguous(at.strides, out.shape, out.itemsize):
            return False
        start = at.offset + sum(map(mul, local.lo, at.strides))
        if out.flags.c_contiguous:
            data = raw(out)
            self._reader.read_into(at.file, start, data)
        elif out.nbytes <= SPAN:
            data = self._scratch[: out.nbytes]
            self._reader.read_into(at.file, start, data)
            out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)
        else:
            return False
        if at.record is not None:
            self._note_piece(at.record, start, data)
        return True

    def _index(self, entry: TensorEntry) -> ChunkIndex:
        """Return the index of a tensor's chunks; those of the last few tensors are kept."""
        known = self._indexes.get(id(entry))
        if known is None:
            self._indexes = dict(list(self._indexes.items())[-3:])
            known = self._indexes[id(entry)] = (entry, ChunkIndex(entry))
        return known[1]

    def _fill(self, out: Array, file: str, offset: int, strides: tuple[int, ...]) -> None:
        if not out.size:
            return
        itemsize = out.itemsize
        if out.flags.c_contiguous and contiguous(strides, out.shape, itemsize):
            self._reader.read_into(file, offset, raw(out))
            return
        worth = worth_a_span(out.shape, strides, itemsize, self._block)
        span = span_of(out.shape, strides, itemsize)
        if worth and span <= SPAN:
            view = self._scratch[:span]
            self._reader.read_into(file, offset, view)
            out[...] = np.ndarray(out.shape, out.dtype, view, 0, strides)
            return
        dim = max((d for d, n in enumerate(out.shape) if n > 1), key=lambda d: strides[d])
        runs = None if worth else _runs(out, dim, strides)
        if runs is not None:
            self._reader.read_runs(file, offset, strides[dim], runs)
            return
        order = sorted(range(out.ndim), key=lambda d: -strides[d])
        stored_so = out.flags.c_contiguous and order == [*range(out.ndim)]
        if not worth and not stored_so and out.nbytes <= SPAN:
            # in the file's order many runs are one call; memory takes them in any order
            stored: Array = np.empty([out.shape[d] for d in order], out.dtype)
            self._fill(stored, file, offset, tuple(strides[d] for d in order))
            out.transpose(order)[...] = stored
            return
        half = out.shape[dim] // 2
        head = tuple(slice(None) for _ in range(dim))
        self._fill(out[(*head, slice(0, half))], file, offset, strides)
        self._fill(out[(*head, slice(half, None))], file, offset + half * strides[dim], strides)

    def _decode(self, at: EncodedBlob) -> bytes:
        if self._blob is None or self._blob[0] != at:
            stored = bytearray(at.nbytes)
            self._reader.read_into(at.file, at.offset, memoryview(stored))
            what = f"{at.file} at byte {at.offset:,}"
            blob = decode(bytes(stored), at.codec, at.size, what=what)
            if len(blob) != at.size:
                raise Damaged(f"{what}: decodes to {len(blob):,} bytes, not {at.size:,}")
            _require_crc(at, blob, what)
            self._blob = (at, blob)
        return self._blob[1]


def _runs(out: Array, dim: int, strides: tuple[int, ...]) -> list[memoryview] | None:
    """Return the memory of each run of bytes, one per index of ``dim``; None if not contiguous."""
    inner = out.shape[dim + 1 :]
    if math.prod(out.shape[:dim]) != 1 or not out.flags.c_contiguous:
        return None
    if not contiguous(strides[dim + 1 :], inner, out.itemsize):
        return None
    memory, run = raw(out), math.prod(inner) * out.itemsize
    return [memory[start : start + run] for start in range(0, len(memory), run)]


def _require_crc(at: EncodedBlob, blob: bytes, what: str) -> None:
    """Raise Damaged if a decoded blob does not match its writer's checksum."""
    record = at.record
    if record is None:
        return
    crc = zlib.crc32(memoryview(blob)[record.offset : record.offset + record.nbytes])
    if crc != record.crc32:
        message = f"{what}: decodes to bytes of CRC-32 {crc:08x}, recorded {record.crc32:08x}"
        raise Damaged(message, "crc-mismatch", file=at.file)


def _strided(data: bytes, start: int, strides: tuple[int, ...], local: Box, itemsize: int) -> Array:
    start += sum(i * s for i, s in zip(local.lo, strides, strict=True))
    if not local.volume:
        return np.empty(local.shape, unit(itemsize))
    return np.ndarray(local.shape, unit(itemsize), data, start, strides)


def _repair(out: Array, ops: tuple[str, ...], dtype: DType) -> None:
    """Turn stored elements into values: swap bytes, resolve conjugate and negative bits, add."""
    if not ops or not out.size:
        return
    values = np.ascontiguousarray(out)
    for op in ops:
        if op.startswith("add"):
            _add(values, dtype, int(op.removeprefix("add")))
        else:
            _REPAIRS[op](values, dtype)
    out[...] = values


def _byteswap(values: Array, dtype: DType) -> None:
    values.reshape(-1).view(f"u{dtype.swap}").byteswap(inplace=True)


def _conjugate(values: Array, dtype: DType) -> None:
    halves = values.reshape(-1).view(f"u{dtype.itemsize // 2}")
    halves[1::2] ^= halves.dtype.type(1 << (dtype.itemsize * 4 - 1))


def _negate(values: Array, dtype: DType) -> None:
    if dtype.kind == "int":
        signed = values.reshape(-1).view(f"i{dtype.itemsize}")
        np.negative(signed, out=signed)
        return
    parts = values.reshape(-1).view(f"u{dtype.swap}")
    parts ^= parts.dtype.type(1 << (dtype.swap * 8 - 1))


def _add(values: Array, dtype: DType, amount: int) -> None:
    """Add a number to floats, rounded once to their type, as torch does (in 32 bits, or 64)."""
    wide = BY_NAME["float64" if dtype.itemsize == 8 else "float32"]
    numbers = cast(values, dtype, wide).view(wide.name)
    with np.errstate(all="ignore"):
        numbers = numbers + numbers.dtype.type(amount)
    values[...] = cast(numbers.view(f"u{wide.itemsize}"), wide, dtype)


_REPAIRS: dict[str, Callable[[Array, DType], None]] = {
    "byteswap": _byteswap,
    "conj": _conjugate,
    "neg": _negate,
}
