"""Fill an array with a box of a chunk, whatever the place and order of its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import mul
from typing import Any

import numpy as np

from ckptool.core.box import Box, contiguous, row_major_strides
from ckptool.core.casts import widest_type
from ckptool.core.catalog import (
    Computed,
    EncodedBlob,
    Extent,
    Place,
    TensorEntry,
)
from ckptool.core.codec import Bytes
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.layout import tiles
from ckptool.core.planning.groups import Tile
from ckptool.core.sharding.index import ChunkIndex, Overlap
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.computed import fill_computed, tensors_behind
from ckptool.engine.read.containers import open_overlaps
from ckptool.engine.read.kept import Blobs, Windows
from ckptool.engine.read.numbers import Array, part_of
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.rounding import cast, may_have_lost
from ckptool.engine.read.segments import by_stride, run_at, strided_reads
from ckptool.errors import Damaged
from ckptool.storage.files import SPAN

_FEW = 4
"""Tensors whose indexes are kept."""
_FREED = 16 << 20
"""Bytes that are allocated and freed, and never touched, before tiles are: of as much memory glibc
then gives nothing back to the kernel, which it would after each tile, and take page by page again.
"""


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


def bits_of(values: Array) -> memoryview:
    """Return the bytes of an array in C order, copied if it is not in that order."""
    return raw(np.ascontiguousarray(values))


def _as_floats(values: Array, dtype: DType) -> Array:
    """Return numbers, or the parts of complex ones, as a flat array."""
    return values.reshape(-1).view(unit(dtype.itemsize))


def cut(values: Array, tile: Tile, buffer: memoryview) -> memoryview:
    """Return the bytes of a tile of a band, in ``buffer``; Damaged if its pieces do not fill it.

    Of equal bands that are stacked along a first dim, return the bytes of the tile of each.
    """
    pieces, shape = tile.pieces, (*values.shape[: values.ndim - len(tile.shape)], *tile.shape)
    part = part_of(values, pieces[0].box) if len(pieces) == 1 else None
    if part is not None and part.flags.c_contiguous:
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
        raise Damaged(f"{tile.entry.name}: {list(tile.shape)} of a local tensor is not covered")
    return data


class Gatherer:
    """Reads boxes of chunks for one thread.

    It keeps the decoded blob that it read last, or one of each tensor that another is computed of;
    ``ranges`` counts the numbers that a cast makes infinite.
    """

    def __init__(self, reader: ByteReader, ranges: RangeCheck | None = None) -> None:
        np.empty(_FREED, "u1")
        self._ranges = ranges
        self._reader = reader
        self._scratch = memoryview(bytearray(SPAN))
        self._by_turns: dict[int, TensorEntry] = {}
        self._blobs, self._windows = Blobs(reader.files, self._by_turns), Windows(self._by_turns)
        self._indexes: dict[int, tuple[TensorEntry, ChunkIndex]] = {}

    def find(self, entry: TensorEntry, box: Box) -> Sequence[Overlap]:
        """Return the parts of a box that a tensor's chunks hold; opens the chunks."""
        return open_overlaps(list(self._index(entry).find(box)))

    def fill(self, values: Array, entry: TensorEntry, overlaps: Iterable[Overlap]) -> None:
        """Copy the elements that chunks hold, as stored, into an array of a tensor's box."""
        for chunk, _, local, where in overlaps:
            view = values if where.shape == values.shape else part_of(values, where)
            self.fill_from(chunk.at, view, local, entry.source_dtype, entry)
            if self._ranges is not None and isinstance(chunk.at, Computed):
                self._count_computed(self._ranges, entry, chunk.at, (view, local))

    def fill_from(
        self,
        at: Place,
        out: Array,
        local: Box,
        dtype: DType,
        entry: TensorEntry | None = None,
    ) -> None:
        """Copy the elements ``local`` of a chunk (in its own coordinates) into ``out``.

        What is one run of bytes of a checksummed record is noted. ``entry`` is the chunk's tensor.
        """
        if isinstance(at, EncodedBlob):
            blob = self._blobs.decode(at, entry)
            out[...] = _view(blob, at.start, at.strides, local, dtype.itemsize)
            _repair(out, at.ops, dtype)
        elif isinstance(at, Extent):
            if not out.size:
                return
            run = run_at(at, local, out.itemsize)
            if run is not None:
                self._read_run(out, at, run)
                return
            start = at.offset + sum(map(mul, local.lo, at.strides))
            self._read_strided(out, at.file, start, at.strides)
            _repair(out, at.ops, dtype)
        elif isinstance(at, Computed):
            self._read_by_turns(at)
            gather = partial(self._windows.gather, self.gather)
            fill_computed(gather, at, out, local, dtype)
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
        """Return a box as ``gather`` does, in memory that the next call may reuse."""
        nbytes = box.volume * entry.source_dtype.itemsize
        values = array(box.shape, entry.source_dtype, self._reader.memory(nbytes))
        self.gather_into(values, entry, box)
        return values

    def read_values(self, entry: TensorEntry, box: Box) -> Array:
        """Return a box as ``read_stored`` does, in the element type that a rewrite requests.

        Raises Unsupported if that needs torch and torch is missing.
        """
        return self.convert(entry, self.read_stored(entry, box))

    def convert(self, entry: TensorEntry, stored: Array) -> Array:
        """Return elements of a tensor in the type that a rewrite requests, given as stored."""
        types = entry.source_dtype, entry.dtype
        result = cast(stored, *types)
        if self._ranges is not None and types[0] != types[1]:
            self._ranges.note(entry.name, stored, types[0], result, types[1])
        return result

    def gather_into(self, values: Array, entry: TensorEntry, box: Box) -> None:
        """Read a box as ``gather`` does, into an array of its shape."""
        self.fill(values, entry, self.find(entry, box))

    def _read_by_turns(self, at: Computed) -> None:
        """Keep a blob or window of each tensor that a place is computed of, as reads alternate.

        The tensors that a computed one of them is computed of are already among them.
        """
        entries = {id(entry): entry for entry in tensors_behind(at)}
        if not entries.keys() <= self._by_turns.keys():
            self._by_turns.clear()
            self._by_turns |= entries

    def _count_computed(
        self, ranges: RangeCheck, entry: TensorEntry, at: Computed, part: tuple[Array, Box]
    ) -> None:
        """Count the computed numbers that exceed the range of their type; complex ones by parts.

        They are computed again, in the widest type, a part of the box at a time.
        """
        (values, local), is_complex = part, entry.source_dtype.kind == "complex"
        dtype, wide = entry.source_dtype.part, widest_type(at)
        pair = BY_NAME["complex128"] if is_complex else wide
        if dtype.kind != "float" or not may_have_lost(_as_floats(values, dtype), dtype):
            return
        for box in tiles(local, pair.itemsize, SPAN):
            parts = _as_floats(part_of(values, box.relative_to(local.lo)), dtype)
            if may_have_lost(parts, dtype):
                numbers: Array = np.empty(box.shape, unit(pair.itemsize))
                self.fill_from(at, numbers, box, pair)
                ranges.note(entry.name, _as_floats(numbers, pair.part), pair.part, parts, dtype)

    def _read_run(self, out: Array, at: Extent, start: int) -> None:
        """Read one run of bytes of a place, and note it."""
        if out.flags.c_contiguous:
            data = raw(out)
            self._reader.read_into(at.file, start, data)
        elif out.nbytes <= SPAN:
            data = self._scratch[: out.nbytes]
            self._reader.read_into(at.file, start, data)
            out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)
        else:
            # too large for scratch, and read piece by piece: a record is read again if it must be
            strides = row_major_strides(out.shape, out.itemsize)
            self._read_strided(out, at.file, start, strides)
            return
        if at.record is not None:
            self._reader.note(at.record, start, data)

    def _index(self, entry: TensorEntry) -> ChunkIndex:
        """Return the index of a tensor's chunks.

        The indexes of the last few tensors are kept, and those of all that are read by turns.
        """
        item = self._indexes.get(id(entry))
        if item is None:
            count = _FEW - 1 + len(self._by_turns)
            # with its tensor: while that is kept no other one gets its id
            self._indexes = dict(list(self._indexes.items())[-count:])
            item = self._indexes[id(entry)] = (entry, ChunkIndex(entry))
        return item[1]

    def _read_strided(self, out: Array, file: str, start: int, strides: tuple[int, ...]) -> None:
        """Read elements that are strided in a file, in the file's order, directly if possible."""
        order, itemsize = by_stride(strides), out.itemsize
        view, strides = out.transpose(order), tuple(strides[dim] for dim in order)
        direct = view.flags.c_contiguous
        block, most = self._reader.policy.block, (SPAN, math.inf if direct else SPAN)
        for read in strided_reads(view.shape, strides, itemsize, block, most):
            inside: Any = (..., *read.inside)
            part, at = view[inside], start + read.offset
            is_runs = read.runs > 1 or contiguous(strides, part.shape, itemsize)
            memory = raw(part) if direct and is_runs else self._scratch[: read.runs * read.nbytes]
            if read.runs > 1:
                starts = range(0, len(memory), read.nbytes)
                runs = [memory[first : first + read.nbytes] for first in starts]
                self._reader.files.read_runs(file, at, read.step, runs)
            else:
                self._reader.read_into(file, at, memory)
            if is_runs and not direct:
                part[...] = np.frombuffer(memory, out.dtype).reshape(part.shape)
            elif not is_runs:
                part[...] = np.ndarray(part.shape, out.dtype, memory, 0, strides)


def _view(data: Bytes, start: int, strides: tuple[int, ...], local: Box, itemsize: int) -> Array:
    start += sum(i * s for i, s in zip(local.lo, strides, strict=True))
    if not local.volume:  # it may begin behind the last byte, which numpy refuses
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
