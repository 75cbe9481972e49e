"""Into how many files each rank's tensors go: into several where ranks need the same rows.

Whoever writes the columns of one rank reads whole rows of the source. So where a mesh cuts columns,
each rank has several files, of some of the tensors each. One process then writes the files of all
ranks with the same tensors, and reads their rows once. Writers of torch and Megatron that have
several threads make several files of a rank, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ckptool.core.box import Box, spans_of
from ckptool.core.catalog import TensorEntry
from ckptool.core.chunks import chunks_of
from ckptool.formats.dcp.cuts import FileSplit, ItemBoxes

_LEAST = 32 << 20
"""Bytes of a file below which starting a process costs more than it saves."""
_FEW = 64
"""A 64th of all bytes may be read by several processes."""
_LONG = 32 << 10
"""Bytes of a rank's part of a row that are read without the rest of the row."""

Cuts = Sequence[tuple[TensorEntry, ItemBoxes]]
"""All tensors with their cuts, the same one for those that are cut alike."""


def split_files(cuts: Cuts, ranks: int) -> FileSplit:
    """Return how the files of so many ranks are split."""
    total, heads = sum(entry.nbytes for entry, _ in cuts), dict[int, int]()
    for cut in _of_columns(cuts, total // _FEW):
        first = dict[int, int]()
        for low, rank in zip(cut.lows[:, 0].tolist(), cut.ranks.tolist(), strict=True):
            heads[_head(heads, rank)] = _head(heads, first.setdefault(low, rank))
    heads = {rank: _head(heads, rank) for rank in heads}
    most = max(Counter(heads.values()).values(), default=1)
    count = min(most, total // ranks // _LEAST)
    return FileSplit(count, _in_order(cuts, total, count), heads) if count > 1 else FileSplit()


def _in_order(cuts: Cuts, total: int, count: int) -> list[int]:
    """Return a number below ``count`` for each tensor, by where its middle is among all bytes."""
    numbers, offset = list[int](), 0
    for entry, _ in cuts:
        numbers.append(min(count - 1, (2 * offset + entry.nbytes) * count // (2 * total)))
        offset += entry.nbytes
    return numbers


def _of_columns(cuts: Cuts, least: int) -> Iterator[ItemBoxes]:
    """Yield the cuts, of more than ``least`` bytes, by which several ranks need the same rows."""
    narrowest, reads_more = dict[int, list[int]](), dict[object, bool]()
    by_id, nbytes = {id(cut): cut for _, cut in cuts}, Counter[int]()
    for entry, cut in cuts:
        if id(cut) not in narrowest:
            narrowest[id(cut)] = _sizes(cut.boxes, min)
        narrow = narrowest[id(cut)]
        if narrow[1:] == [*entry.shape[1:]] or not entry.chunks:
            continue
        key = id(cut), chunks_of(entry).cut
        if key not in reads_more:
            reads_more[key] = _reads_more(entry, narrow)
        nbytes[id(cut)] += entry.nbytes * reads_more[key]
    yield from (by_id[at] for at, size in nbytes.items() if size > least)


def _reads_more(entry: TensorEntry, narrow: Sequence[int]) -> bool:
    """Return whether reading boxes, the ``narrow``est in each dim, reads bytes beside them, too."""
    wide = _sizes(chunks_of(entry).boxes, max)
    cut = [dim for dim in range(1, len(wide)) if narrow[dim] < wide[dim]]
    return bool(cut) and math.prod(narrow[cut[-1] :]) * entry.source_dtype.itemsize < _LONG


def _sizes(boxes: Sequence[Box], choose: Callable[..., int]) -> list[int]:
    """Return one of the sizes that boxes have in each dim, leaving empty boxes out."""
    return [
        choose((end - start for start, end in spans if end > start), default=0)
        for spans in spans_of(boxes)
    ]


def _head(heads: dict[int, int], rank: int) -> int:
    """Return the rank that stands for all that share rows with a rank."""
    while (head := heads.setdefault(rank, rank)) != rank:
        rank = head
    return rank
