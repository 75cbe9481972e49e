"""Identical files of two ranks: one was copied over the other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.chunks import chunks_of
from ckptool.errors import Problem
from ckptool.storage.files import Files

_SAMPLE = 1 << 12
_BLOCK = 1 << 22

_Shards = dict[str, tuple[TensorEntry, Chunk]]


def copied_files(catalog: Catalog, source: Files) -> Iterator[Problem]:
    """Yield each file that equals the file of another rank, though both hold shards.

    Both ends of files of one size are read, and all of two whose ends are equal. Skips shards with
    one value throughout, such as a state of zeros, and stores, where each file would cost requests.
    """
    entries = catalog.tensors.values()
    if source.policy.by_request or not any(chunks_of(entry).located for entry in entries):
        return
    alike = _with_equal_ends(catalog.files, source)
    located = (entry for entry in entries if chunks_of(entry).located)
    files = _shards_by_file(located) if alike else {}
    for names in alike:
        first, *others = [name for name in names if name in files] or [""]
        for other in others:
            if (
                _are_elsewhere(files[first], files[other])
                and not all(_is_constant(*shard, source) for shard in files[first].values())
                and _are_equal(first, other, source)
            ):
                message = f"{other}: identical to {first}, which holds other shards: a copy"
                yield Problem(message, "rank-copied", file=other)


def _with_equal_ends(files: Iterable[str], source: Files) -> list[list[str]]:
    """Return files of one size with the same first and last bytes, if there are two."""
    sizes: dict[int, list[str]] = defaultdict(list)
    for name in files:
        if name in source.files:  # other ranks' memory cannot be read
            sizes[source.files[name]].append(name)
    alike: dict[object, list[str]] = defaultdict(list)
    for size, names in sizes.items():
        nbytes = min(_SAMPLE, size)
        for name in names if len(names) > 1 and size else ():
            ends = (source.read(name, at, nbytes) for at in (0, size - nbytes))
            alike[size, *ends].append(name)
    return [names for names in alike.values() if len(names) > 1]


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
    both = one.keys() & other.keys()
    return bool(both) and all(one[name][1].box != other[name][1].box for name in both)


def _are_equal(one: str, other: str, source: Files) -> bool:
    size = source.files[one]
    spans = ((start, min(_BLOCK, size - start)) for start in range(0, size, _BLOCK))
    return all(source.read(one, *span) == source.read(other, *span) for span in spans)
