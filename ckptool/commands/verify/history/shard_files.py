"""Whether a file with shards of matrices is of another save than the files with the other shards.

Training moves all of a matrix. So if the shards that one file has of all matrices are those of an
earlier save, and the other shards of these matrices are not, the file is of that save. Tables whose
rows are looked up are not compared, nor experts: those that were not chosen stand still.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ckptool.commands.verify.checks.content import locate_whole
from ckptool.commands.verify.checks.measures import are_equal
from ckptool.commands.verify.history.matrices import Matrices
from ckptool.commands.verify.history.saves import Save
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.text import list_some
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.segments import entry_needs
from ckptool.engine.read.tensors import TensorReader, TensorSource, TensorTile
from ckptool.engine.read.tiles import Job, read_tiles
from ckptool.errors import CkptoolError, Problem

_MOST, _MOST_ASKED = 1 << 6, 1 << 3
"""Matrices of which shards are compared: on a disk, and in a store."""
_MOST_SHARDS = 1 << 13
"""Shards that are compared in all, so that thousands of ranks take neither minutes nor memory."""
_LONGEST, _ENOUGH = 1 << 10, 1 << 6
"""Elements that are compared of a shard, and how many are not equal by chance."""
_LEAST = 4
"""Matrices whose shards in one file do not all stand still by chance."""
_TRAINED = 0.25
"""The share of elements that move if a matrix is trained, and not only rounded otherwise."""
_PLACES = 3
"""Places of a shard that are looked at: its first elements, and those further on."""
_FEW = 2
_CHOSEN = re.compile(r"(?i)expert|moe|emb|wte|table|lookup|codebook|memory")
"""In the names of tensors of which training may move only some rows."""


class _Shard(NamedTuple):
    """What is read of a shard: a box of a matrix that one file has."""

    name: str
    file: str
    box: Box


def shard_file_problems(save: Save, predecessors: Sequence[Save]) -> Iterator[Problem]:
    """Yield the files whose shards of a model, or of its optimizer, are of a predecessor alone."""
    for now, olds in (
        (save.weights, [old.weights for old in predecessors]),
        (save.state, [old.state for old in predecessors]),
    ):
        shards = _shards_of(now)
        values = _read(now, shards) if shards else {}
        for old, predecessor in zip(olds, predecessors, strict=True) if values else ():
            files = _files_of(values, _read(old, [*values]))
            if files := [file for file in files if _are_equal_in(file, shards, now, old)]:
                message = f"{list_some(files, _FEW)}: the shards in it are those of"
                message += f" {predecessor.name}, but those in the other files are not"
                yield Problem(f"{message}: they are of two saves", "counts-differ", file=files[0])
                return


def _shards_of(matrices: Matrices) -> list[_Shard]:
    """Return places in the shards of some matrices that are cut into several files."""
    entries = {
        name: entry
        for name, entry in matrices.entries.items()
        if len(entry.chunks) > 1 and not _CHOSEN.search(name)
    }
    source = matrices.survey.source
    most = _MOST_ASKED if source.policy.by_request else _MOST
    cuts = max((len(entry.chunks) for entry in entries.values()), default=1)
    most = max(_MOST_ASKED, min(most, _MOST_SHARDS // cuts))
    names = [*entries][:: max(1, -(-len(entries) // most))]
    first: dict[tuple[str, str], Box] = {}
    for name, entry in locate_whole(matrices.survey, names).items() if names else ():
        for chunk in entry.chunks:
            first.setdefault((name, chunk.at.file), chunk.box)
    return [
        _Shard(name, file, box)
        for (name, file), whole in first.items()
        for box in dict.fromkeys(_places_in(whole))
        if box.volume >= _ENOUGH
    ]


def _places_in(box: Box) -> Iterator[Box]:
    """Yield boxes of a few elements, from the first ones of a box to the last."""
    sizes, longest = [1] * len(box.shape), _LONGEST
    for dim in reversed(range(len(box.shape))):
        sizes[dim] = max(1, min(box.shape[dim], longest))
        longest //= sizes[dim]
    spare = [whole - size for whole, size in zip(box.shape, sizes, strict=True)]
    for at in range(_PLACES):
        shift = [size * at // (_PLACES - 1) for size in spare]
        yield Box.at([low + by for low, by in zip(box.lo, shift, strict=True)], sizes)


def _read(matrices: Matrices, shards: Sequence[_Shard]) -> dict[_Shard, Array]:
    """Return the bits of the shards that can be read in a save, however it is cut."""
    entries = locate_whole(matrices.survey, {s.name for s in shards} & matrices.entries.keys())
    values: dict[_Shard, Array] = {}

    def take(shard: _Shard, tiles: Iterator[TensorTile]) -> None:
        try:
            for tile in tiles:
                values[shard] = tile.values.reshape(-1).copy()
        except CkptoolError:
            return  # the reader of all data reports on it

    jobs = (
        _job(shard, entry)
        for shard in shards
        if (entry := entries.get(shard.name)) and _fits(shard.box, entry)
    )
    source = matrices.survey.source
    read_tiles(TensorSource(source), jobs, take, source.policy.workers)
    return values


def _fits(box: Box, entry: TensorEntry) -> bool:
    return len(box.shape) == len(entry.shape) and all(
        stop <= size for stop, size in zip(box.hi, entry.shape, strict=True)
    )


def _job(shard: _Shard, entry: TensorEntry) -> Job[_Shard, TensorReader, TensorTile]:
    nbytes = shard.box.volume * entry.source_dtype.itemsize

    def read(reader: TensorReader) -> Iterator[TensorTile]:
        yield TensorTile(shard.box, reader.elements.read_stored(entry, shard.box), nbytes)

    return Job(shard, read, [partial(entry_needs, entry, [shard.box])], nbytes)


def _are_equal_in(file: str, shards: Sequence[_Shard], now: Matrices, old: Matrices) -> bool:
    """Return whether all shards in a file are, as a whole, those of another save.

    Of the rows of a table that are seldom trained, the first may stand still in one file alone.
    """
    for name in (shard.name for shard in shards if shard.file == file):
        one, other = now.opened(name), old.opened(name)
        if one is None or other is None:
            return False
        boxes = tuple(chunk.box for chunk in one.chunks if chunk.at.file == file)
        if not are_equal(one, other, now.survey.source, old.survey.source, boxes):
            return False
    return True


def _files_of(now: dict[_Shard, Array], old: dict[_Shard, Array]) -> list[str]:
    """Return the files whose shards all stand still, while others of these matrices moved."""
    moved: dict[str, dict[str, float]] = defaultdict(dict)
    for shard, bits in now.items():
        other = old.get(shard)
        if other is not None and other.dtype == bits.dtype:
            share = float(np.count_nonzero(bits != other)) / bits.size
            moved[shard.file][shard.name] = max(share, moved[shard.file].get(shard.name, 0.0))
    still = [file for file, shares in moved.items() if not any(shares.values())]
    most: dict[str, float] = defaultdict(float)
    for shares in moved.values():
        for name, share in shares.items():
            most[name] = max(most[name], share)
    trained = {name for name, share in most.items() if share >= _TRAINED}
    return sorted(
        file
        for file in still
        if len(moved[file]) >= _LEAST and 2 * len(trained & moved[file].keys()) >= len(moved[file])
    )
