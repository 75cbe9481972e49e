"""What several ranks stored alike: the copies of a chunk, and files, of which one was copied."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.casts import stored_tensors
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Computed,
    Container,
    Copy,
    Extent,
    Place,
    TensorEntry,
)
from ckptool.core.chunks import chunks_of, proved_equal
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import Problem
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.engine.check.pairs import PairTile, TensorPair


_SAMPLE = 1 << 12
"""Bytes that are read first: of either end of a file, and of a shard."""
_BLOCK = 1 << 22
"""Bytes of two files that are compared at a time."""

_Shards = dict[str, tuple[TensorEntry, Chunk]]


def differing_replicas(
    entries: Iterable[TensorEntry], files: Files, workers: int = 1
) -> list[Problem]:
    """Return a problem for each replica whose values differ from the first rank's.

    Replicas of a computed tensor are those of the tensors it is computed of. Copies whose recorded
    checksums prove them equal are not read.
    """
    replicas = [
        (entry, chunk, copy)
        for tensor in entries
        if not chunks_of(tensor).alone
        for entry in stored_tensors(tensor)
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


def copied_files(catalog: Catalog, source: Files) -> Iterator[Problem]:
    """Yield each file that equals the file of another rank, though both hold shards.

    Both ends of files of one size are read, and all of two whose ends are equal. Skips shards with
    one value throughout, such as a state of zeros, and stores, where each file would cost requests.
    """
    entries = catalog.tensors.values()
    if source.policy.by_request or not any(chunks_of(entry).located for entry in entries):
        return
    groups = _with_equal_ends(catalog.files, source)
    located = (entry for entry in entries if chunks_of(entry).located)
    files = _shards_by_file(located) if groups else {}
    for names in groups:
        first, *rest = [name for name in names if name in files] or [""]
        for other in rest:
            if (
                _are_elsewhere(files[first], files[other])
                and not all(_is_constant(*shard, source) for shard in files[first].values())
                and _are_equal(first, other, source)
            ):
                message = f"{other}: identical to {first}, which holds other shards: a copy"
                yield Problem(message, "rank-copied", file=other)


def _with_equal_ends(files: Iterable[str], source: Files) -> list[list[str]]:
    """Return groups of two files and more that have the same size, first and last bytes."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for name in files:
        if name in source.files:  # other ranks' memory cannot be read
            by_size[source.files[name]].append(name)
    by_ends: dict[object, list[str]] = defaultdict(list)
    for size, names in by_size.items():
        nbytes = min(_SAMPLE, size)
        for name in names if len(names) > 1 and size else ():
            ends = (source.read(name, at, nbytes) for at in (0, size - nbytes))
            by_ends[size, *ends].append(name)
    return [names for names in by_ends.values() if len(names) > 1]


def _shards_by_file(entries: Iterable[TensorEntry]) -> dict[str, _Shards]:
    """Return the tensors of which each file holds one shard, if several files share them."""
    files: dict[str, _Shards] = defaultdict(dict)
    for entry in entries:
        holders = {chunk.at.file for chunk in entry.chunks}
        if len(holders) > 1:
            for chunk in entry.chunks:
                if isinstance(chunk.at, Extent):
                    files[chunk.at.file].setdefault(entry.name, (entry, chunk))
    return files


def _is_constant(entry: TensorEntry, chunk: Chunk, source: Files) -> bool:
    """Return whether a shard begins with one repeated element, or has only one."""
    size, nbytes = entry.source_dtype.itemsize, source.files[chunk.at.file] - chunk.at.offset
    nbytes = min(_SAMPLE, math.prod(chunk.box.shape) * size, nbytes) // size * size
    data = source.read(chunk.at.file, chunk.at.offset, nbytes)
    return data == data[:size] * (nbytes // size)


def _are_elsewhere(one: _Shards, other: _Shards) -> bool:
    """Return whether two files hold shards of different places of each tensor that both hold."""
    names = one.keys() & other.keys()
    return bool(names) and all(one[name][1].box != other[name][1].box for name in names)


def _are_equal(one: str, other: str, source: Files) -> bool:
    size = source.files[one]
    spans = ((start, min(_BLOCK, size - start)) for start in range(0, size, _BLOCK))
    return all(source.read(one, *span) == source.read(other, *span) for span in spans)
