"""The share of work of one of several processes, which each computes alone and all alike."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct

from ckptool.core.catalog import Extent
from ckptool.core.chunks import chunks_of
from ckptool.engine.read.containers import likely_place
from ckptool.engine.read.segments import is_run
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.core.catalog import Chunk, Place, TensorEntry
    from ckptool.core.layout import Layout, Part
    from ckptool.core.planning.plan import Plan


class Share(Struct, frozen=True):
    """One of ``size`` shares of work, counted from 0; the only one if nothing is shared."""

    position: int = 0
    size: int = 1

    @property
    def is_all(self) -> bool:
        """Whether nothing is shared."""
        return self.size == 1

    def takes(self, sizes: Sequence[int]) -> list[int]:
        """Return the indices of this share's items, in order, of all with ``sizes``."""
        if self.is_all:
            return list(range(len(sizes)))
        owners = _assign(sizes, self.size)
        return [at for at, owner in enumerate(owners) if owner == self.position]

    def files(self, layout: Layout) -> list[int]:
        """Return the indices in the layout of the files that this share writes, in order.

        Shares are balanced by bytes. Files that are made of the same rows are in one share.
        """
        units: dict[object, list[int]] = {}
        for at, file in enumerate(layout.files):
            units.setdefault(file.unit, []).append(at)
        groups = [*units.values()]
        sizes = [sum(layout.files[at].nbytes for at in unit) for unit in groups]
        return sorted(at for unit in self.takes(sizes) for at in groups[unit])


ALL = Share()
"""All of the work."""
_AS_BALANCED = 1.05
"""Times a balanced share that the largest one may have, to keep neighbors together."""


SourceChunks = list[tuple["TensorEntry", "Chunk"]]
"""Chunks of the source, with their tensors."""


def parts_of(plan: Plan, numbers: Iterable[int]) -> Iterator[Part]:
    """Yield the parts of some files of the layout."""
    return (part for number in numbers for part in plan.layout.files[number].parts)


def checked_chunks(plan: Plan, numbers: Collection[int]) -> tuple[SourceChunks, SourceChunks]:
    """Return the chunks whose records the writer of some files checks, and those it reads runs of.

    ``numbers`` are indices in the layout. A record that several files need is checked whole only by
    the writer of one of them, which all writers know from the places of chunks alone: each opens
    those of its own files. What is stored as it is has no record. If several files need a run each
    of a record, nobody has to read it whole: each writer notes the CRC-32 of its runs.
    """
    whole: SourceChunks = []
    cut: SourceChunks = []
    first_ids: set[object] = set()
    own_numbers, shared = frozenset(numbers), _shared_places(plan)
    names = {entry.name for entry in plan.entries if not chunks_of(entry).bare}
    for entry, chunk in plan.chunks(parts_of(plan, numbers), names):
        place = _place(chunk.at)
        chunks = shared.get(place, [(entry, chunk)])
        first = chunks[0]
        if place is None or id(first[1]) in first_ids:
            continue
        first_ids.add(id(first[1]))
        files = sorted({n for tensor, part in chunks for n in plan.files_with(tensor, part.box)})
        if len(files) > 1 and _is_read_in_runs(plan, chunks):
            cut.append(first)
        # by a hash that is the same in all processes, and spreads records over them
        elif files[zlib.crc32(first[0].name.encode(errors="replace")) % len(files)] in own_numbers:
            whole.append(first)
    return whole, cut


def _place(at: Place) -> object:
    """Return the key shared by chunks in one record, or one item; None if no record is known."""
    return at.record if isinstance(at, Extent) else (at.file, at.offset)


def _shared_places(plan: Plan) -> dict[object, SourceChunks]:
    """Return the chunks, of tensors that are written, by the place that several of them share.

    Chunks of tables, and chunks that are opened late, are in records of their own.
    """
    places: dict[object, SourceChunks] = {None: []}
    for entry in plan.entries:
        if not chunks_of(entry).alone:
            for chunk in entry.chunks:
                places.setdefault(_place(chunk.at), []).append((entry, chunk))
    del places[None]
    shared = {place: chunks for place, chunks in places.items() if len(chunks) > 1}
    return {
        place: [(entry, chunk) for entry, chunk in chunks if entry.name in plan.written]
        for place, chunks in shared.items()
    }


def _is_read_in_runs(plan: Plan, chunks: SourceChunks) -> bool:
    """Return whether the files together read all of the record that the chunks share, in runs.

    Runs are only noted of a chunk that is one run as stored, with its values unchanged.
    """
    run_bytes = nbytes = 0
    for entry, chunk in chunks:
        itemsize, shape = entry.source_dtype.itemsize, chunk.box.shape
        at = likely_place(chunk.at, itemsize)
        if not is_run(at, shape, itemsize):
            return False
        nbytes = 0 if at.record is None else at.record.nbytes
        run_bytes += chunk.box.volume * itemsize
    return run_bytes >= nbytes and all(plan.is_cut_in_runs(e, chunk.box) for e, chunk in chunks)


def _assign(sizes: Sequence[int], count: int) -> list[int]:
    """Return the owner of each item: of neighbors the same one, unless that is less balanced.

    Neighbors are mostly made from the same rows of the source, which their owner then reads once.
    """
    balanced = _assign_balanced(sizes, count)
    if len(sizes) <= count:
        return balanced
    in_order, most = _assign_in_order(sizes, count), _AS_BALANCED * _largest_load(sizes, balanced)
    return in_order if _largest_load(sizes, in_order) <= most else balanced


def _assign_in_order(sizes: Sequence[int], count: int) -> list[int]:
    """Return the owner of each item, by where its middle is among all bytes."""
    total, ends = sum(sizes), accumulate(sizes)
    middles = (2 * end - nbytes for end, nbytes in zip(ends, sizes, strict=True))
    return [min(count - 1, middle * count // max(1, 2 * total)) for middle in middles]


def _assign_balanced(sizes: Sequence[int], count: int) -> list[int]:
    """Return the owner of each item: the largest first, to whoever has the fewest bytes so far."""
    owners = [0] * len(sizes)
    load = [(0, owner) for owner in range(count)]
    heapify(load)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        nbytes, owner = load[0]
        owners[at] = owner
        heapreplace(load, (nbytes + sizes[at], owner))
    return owners


def _largest_load(sizes: Sequence[int], owners: Sequence[int]) -> int:
    """Return the bytes of the owner who has the most."""
    loads = Counter[int]()
    for nbytes, owner in zip(sizes, owners, strict=True):
        loads[owner] += nbytes
    return max(loads.values(), default=0)


def parse_part(text: str, option: str) -> Share:
    """Return the share named by ``3/8``: the third of eight. UsageError if it is invalid."""
    number, slash, count = text.partition("/")
    if (
        not (slash and number.isdecimal() and count.isdecimal())
        or max(map(len, (number, count))) > 6
    ):
        raise UsageError(f"invalid {option} {text!r}: expected K/N", hint=f"such as {option} 1/8")
    if not 1 <= int(number) <= int(count):
        raise UsageError(
            f"invalid {option} {text!r}: no such part",
            hint=f"the parts of {count} are 1 to {count}",
        )
    return Share(int(number) - 1, int(count))
