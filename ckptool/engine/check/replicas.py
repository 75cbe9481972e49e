"""Compare the copies of a chunk that several ranks stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.casts import stored_tensors
from ckptool.core.catalog import (
    Chunk,
    Computed,
    Container,
    Copy,
    Place,
    TensorEntry,
)
from ckptool.core.chunks import chunks_of, proved_equal
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import Problem
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.engine.check.pairs import PairTile, TensorPair


def differing_replicas(
    entries: Iterable[TensorEntry], files: Files, workers: int = 1
) -> list[Problem]:
    """Return a problem for each replica whose values differ from the first rank's.

    Of a computed tensor those of what it is computed of count. Copies whose recorded checksums
    prove them equal are not read.
    """
    replicas = [
        (entry, chunk, copy)
        for each in entries
        if not chunks_of(each).alone
        for entry in stored_tensors(each)
        if not chunks_of(entry).alone
        for chunk in entry.chunks
        for copy in chunk.copies
        if not proved_equal(chunk.at, copy.at)
    ]
    if not replicas:
        return []  # without numpy, which takes long to import
    from ckptool.engine.check.pairs import PairSource, pair_jobs, same_bits
    from ckptool.engine.read.tensors import TensorSource

    pairs = [_pair(*replica) for replica in replicas]
    differing: set[int] = set()

    def compare(subject: None, tiles: Iterator[PairTile]) -> None:
        for tile in tiles:
            pair, one, other = tile.require()
            if not same_bits(one, other):
                differing.add(id(pair))
                return

    source = TensorSource(files)
    read_tiles(PairSource(source, source), pair_jobs(pairs), compare, workers)
    return [
        Problem(
            f"{entry.name} {chunk.box}: {_holders(chunk, copy)} hold different values of what"
            " should be one replicated tensor",
            "replicas-differ",
            file=copy.at.file,
            tensor=entry.name,
        )
        for pair, (entry, chunk, copy) in zip(pairs, replicas, strict=True)
        if id(pair) in differing
    ]


def _holders(chunk: Chunk, copy: Copy) -> str:
    """Return the holders of both copies of a box: two ranks, or one, if a map joined tensors."""
    if chunk.rank == copy.rank:
        return "the tensors that it is made of"
    return f"rank {chunk.rank} and rank {copy.rank}"


def _pair(entry: TensorEntry, chunk: Chunk, copy: Copy) -> TensorPair:
    """Return the elements at the two places as separate tensors, as they are stored."""
    from ckptool.engine.check.pairs import TensorPair

    shape = _without_repeats(chunk.box.shape, chunk.at, copy.at)
    whole, dtype = Box.whole(shape), entry.source_dtype
    stored = replace(entry, dtype=dtype, stored=None, shape=shape)
    one, other = (replace(stored, chunks=(Chunk(whole, at),)) for at in (chunk.at, copy.at))
    return TensorPair(one, other)


def _without_repeats(shape: tuple[int, ...], one: Place, other: Place) -> tuple[int, ...]:
    """Return the shape without the dims along which both places repeat one element."""
    if isinstance(one, Container | Computed) or isinstance(other, Container | Computed):
        return shape
    pairs = zip(shape, one.strides, other.strides, strict=True)
    return tuple(min(n, 1) if a == b == 0 else n for n, a, b in pairs)
