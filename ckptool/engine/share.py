"""The share of work of one of several processes, which each computes alone and all alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from ckptool.core.catalog import Extent
from ckptool.core.sharding.table import ChunkTable, WholeTensor
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.core.catalog import Chunk, TensorEntry
    from ckptool.core.layout import Layout
    from ckptool.core.plan import Plan


class Share(NamedTuple):
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
        owners = _balanced(sizes, self.size)
        return [at for at, owner in enumerate(owners) if owner == self.position]

    def files(self, layout: Layout, mesh_size: int | None) -> list[int]:
        """Return the indices in the layout of the files that this share writes.

        If there are as many shares as the mesh has ranks, each has one rank's files; else they are
        balanced by bytes. The first writes what belongs to all ranks.
        """
        if self.size == mesh_size:
            owners = [file.rank or 0 for file in layout.files]
            return [at for at, owner in enumerate(owners) if owner == self.position]
        return self.takes([file.nbytes for file in layout.files])


ALL = Share()
"""All of the work."""


Cut = list[tuple["TensorEntry", "Chunk"]]
"""Chunks of the source, with their tensors, of which several writers read a run each."""


def checked_chunks(
    plan: Plan, numbers: Collection[int], cut: Cut | None = None
) -> Iterator[tuple[TensorEntry, Chunk]]:
    """Yield the chunks, with their tensors, whose records the writer of some files checks.

    ``numbers`` are indices in the layout. A record that several files need is checked whole only by
    the writer of one of them. If a tensor's chunks are in a table, each has its own record, so
    those of other files are skipped. What is stored as it is has none.

    ``cut``, if there is one, gets the chunks that several files need a run of each, instead:
    nobody has to read their records whole if each writer notes the CRC-32 of its run.
    """
    seen: set[object] = set()
    mine = frozenset(numbers)
    tabled = {entry.name for entry in plan.entries if isinstance(entry.chunks, ChunkTable)}
    for entry, chunk in plan.chunks(numbers, tabled):
        if id(chunk) not in seen:
            seen.add(id(chunk))
            if cut is not None and plan.is_cut_in_runs(entry, chunk.box):
                cut.append((entry, chunk))
            elif plan.checking_file(entry, chunk.box) in mine:
                yield entry, chunk
    others = {e.name for e in plan.entries if not isinstance(e.chunks, ChunkTable | WholeTensor)}
    holders: dict[object, tuple[TensorEntry, Chunk, list[int]]] = {}
    for number in range(len(plan.layout.files)) if others else ():
        for entry, chunk in plan.chunks([number], others):
            at = chunk.at
            if not isinstance(at, Extent) or at.record is not None:
                place = at.record if isinstance(at, Extent) else (at.file, at.offset)
                holders.setdefault(place, (entry, chunk, []))[2].append(number)
    for entry, chunk, files in holders.values():
        if cut is not None and plan.is_cut_in_runs(entry, chunk.box):
            cut += [(entry, chunk)] if mine.intersection(files) else []
        elif plan.checker(entry, files) in mine:
            yield entry, chunk


def _balanced(sizes: Sequence[int], count: int) -> list[int]:
    """Return the owner of each item: the largest first, to whoever has the fewest bytes so far."""
    owners = [0] * len(sizes)
    load = [(0, owner) for owner in range(count)]
    heapify(load)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        nbytes, owner = load[0]
        owners[at] = owner
        heapreplace(load, (nbytes + sizes[at], owner))
    return owners


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
