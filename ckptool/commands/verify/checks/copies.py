"""Files of two ranks that are one and the same: one was copied over the other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.errors import Problem
from ckptool.storage.local import Files

_SAMPLE = 1 << 12
_BLOCK = 1 << 22

_Shards = dict[str, tuple[TensorEntry, Chunk]]


def copied_files(entries: Iterable[TensorEntry], source: Files) -> Iterator[Problem]:
    """Yield each file that is byte for byte the file of another rank, though both hold shards.

    Of each file both ends are read, and all of two of a size whose ends are alike. Not where the
    shards have one value throughout, as a state of zeros, and not in a store, where each file would
    cost requests more.
    """
    if source.block > 1:
        return
    files = _shards_by_file(entries)
    alike: dict[object, list[str]] = defaultdict(list)
    for file in files:
        size = source.files[file]
        nbytes = min(_SAMPLE, size)
        ends = (source.read(file, at, nbytes) for at in (0, size - nbytes))
        alike[size, *ends].append(file)
    for first, *others in alike.values():
        for other in others:
            if (
                _are_elsewhere(files[first], files[other])
                and not all(_is_constant(*shard, source) for shard in files[first].values())
                and _are_equal(first, other, source)
            ):
                message = f"{other}: byte for byte as {first}, which holds other shards: copied"
                yield Problem(message, "rank-copied", file=other)


def _shards_by_file(entries: Iterable[TensorEntry]) -> dict[str, _Shards]:
    """Return the tensors that each file holds one shard of, of those that several files share."""
    files: dict[str, _Shards] = defaultdict(dict)
    for entry in entries:
        holders = {chunk.at.file for chunk in entry.chunks}
        if len(holders) > 1:
            for chunk in entry.chunks:
                if isinstance(chunk.at, Extent):
                    files[chunk.at.file].setdefault(entry.name, (entry, chunk))
    return files


def _is_constant(entry: TensorEntry, chunk: Chunk, source: Files) -> bool:
    """Return whether a shard begins with one element again and again, or is only one."""
    size, nbytes = entry.source_dtype.itemsize, source.files[chunk.at.file] - chunk.at.offset
    nbytes = min(_SAMPLE, math.prod(chunk.box.shape) * size, nbytes) // size * size
    data = source.read(chunk.at.file, chunk.at.offset, nbytes)
    return data == data[:size] * (nbytes // size)


def _are_elsewhere(one: _Shards, other: _Shards) -> bool:
    """Return whether two files hold shards of other places of each tensor that both hold."""
    both = one.keys() & other.keys()
    return bool(both) and all(one[name][1].box != other[name][1].box for name in both)


def _are_equal(one: str, other: str, source: Files) -> bool:
    size = source.files[one]
    spans = ((start, min(_BLOCK, size - start)) for start in range(0, size, _BLOCK))
    return all(source.read(one, *span) == source.read(other, *span) for span in spans)
