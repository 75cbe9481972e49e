"""FSDP1's flat parameters, taken apart.

A flat parameter is one tensor of one dim in which the parameters of an FSDP unit lie end to end,
row-major, some with padding between them. It is called ``_flat_param`` below the unit's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckptool.core.box import flat_range, row_major_strides
from ckptool.core.catalog import Chunk, Copy, Extent, Packed, Path, Place, TensorEntry, flat_name
from ckptool.errors import Damaged
from ckptool.formats._assemble import shifted

FLAT = "_flat_param"


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter in a flat one, and the element at which it begins there."""

    path: Path
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def taken_apart(flat: TensorEntry, members: Iterable[Member]) -> Iterator[TensorEntry]:
    """Each member as a tensor of its own, where some of its elements are stored.

    Raises Damaged where a member ends outside the flat parameter, or that has other than one dim.
    """
    if len(flat.shape) != 1:
        raise Damaged(f"{flat.name}: a flat parameter of {len(flat.shape)} dims")
    for member in members:
        if not 0 <= member.start <= member.stop <= flat.shape[0]:
            raise Damaged(
                f"{flat_name(member.path)}: elements {member.start:,} to {member.stop:,} of"
                f" {flat.name}, which has {flat.shape[0]:,}"
            )
        chunks = [chunk for piece in flat.chunks for chunk in _pieces(flat, piece, member)]
        if chunks or member.start == member.stop:
            name = flat_name(member.path)
            entry = TensorEntry(name, member.path, flat.dtype, member.shape, tuple(chunks))
            yield replace(entry, stored=flat.stored)


def _pieces(flat: TensorEntry, chunk: Chunk, member: Member) -> Iterator[Chunk]:
    """What one chunk of the flat parameter holds of a member."""
    low = max(chunk.box.lo[0], member.start)
    high = min(chunk.box.hi[0], member.stop)
    if low >= high:
        return
    strides = row_major_strides(member.shape, flat.source_dtype.itemsize)
    for box in flat_range(member.shape, low - member.start, high - member.start):
        skip = low - chunk.box.lo[0]
        at = _reshaped(flat, chunk.at, skip, strides)
        copies = tuple(
            Copy(_reshaped(flat, copy.at, skip, strides), copy.rank) for copy in chunk.copies
        )
        yield Chunk(box, at, chunk.rank, copies)
        low += box.volume


def _reshaped(flat: TensorEntry, at: Place, skip: int, strides: tuple[int, ...]) -> Place:
    """The place ``skip`` elements into a flat one, addressed with a member's strides."""
    if not isinstance(at, Extent | Packed) or at.strides[0] != flat.source_dtype.itemsize:
        raise Damaged(f"{flat.name}: a flat parameter whose elements do not lie side by side")
    moved = shifted(at, (skip,))
    return replace(moved, strides=strides) if isinstance(moved, Extent | Packed) else moved
