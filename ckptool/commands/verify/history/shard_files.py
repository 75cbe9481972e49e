"""Whether a file with shards of matrices is of another save than the files with the other shards.

Training moves all of a matrix. So if the shards that one file has of all matrices are those of an
earlier save, and the other shards of these matrices are not, the file is of that save. Tables whose
rows are looked up are not compared, nor experts: those that were not chosen stand still.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckptool.commands.verify.checks.content import locate_whole
from ckptool.commands.verify.checks.measures import are_equal
from ckptool.commands.verify.history.matrices import Matrices
from ckptool.commands.verify.history.samples import read_boxes, sizes_of_run, spread
from ckptool.commands.verify.history.saves import Save
from ckptool.core.box import Box
from ckptool.core.text import list_some
from ckptool.engine.read.numbers import Array
from ckptool.errors import Problem

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
_GLANCE = 2
"""Shards of a file that are read first: if one of them moved, the others need not be."""
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
        first = _read(now, _first_of_each(shards)) if shards else {}
        for old, predecessor in zip(olds, predecessors, strict=True) if first else ():
            if not _still(_moved(first, _read(old, [*first]))):
                continue
            files = _files_of(_moved(_read(now, shards), _read(old, shards)))
            if files := [file for file in files if _are_equal_in(file, shards, now, old)]:
                message = f"{list_some(files, _FEW)}: the shards in it are those of"
                message += f" {predecessor.name}, but those in the other files are not"
                yield Problem(f"{message}: they are of two saves", "counts-differ", file=files[0])
                return


def _shards_of(matrices: Matrices) -> list[_Shard]:
    """Return the beginning of each shard of some matrices that are cut into several files."""
    entries = {
        name: entry
        for name, entry in matrices.entries.items()
        if len(entry.chunks) > 1 and not _CHOSEN.search(name)
    }
    source = matrices.survey.source
    most = _MOST_ASKED if source.policy.by_request else _MOST
    cuts = max((len(entry.chunks) for entry in entries.values()), default=1)
    most = max(_MOST_ASKED, min(most, _MOST_SHARDS // cuts))
    names = spread([*entries], most)
    shards: dict[tuple[str, str], _Shard] = {}
    for name, entry in locate_whole(matrices.survey, names).items() if names else ():
        for chunk in entry.chunks:
            begin = Box.at(chunk.box.lo, sizes_of_run(chunk.box.shape, _LONGEST))
            shard = _Shard(name, chunk.at.file, begin)
            if shard.box.volume >= _ENOUGH:
                shards.setdefault(shard[:2], shard)
    return [*shards.values()]


def _first_of_each(shards: Iterable[_Shard]) -> list[_Shard]:
    by_file: dict[str, list[_Shard]] = defaultdict(list)
    for shard in shards:
        by_file[shard.file].append(shard)
    return [shard for of_file in by_file.values() for shard in of_file[:_GLANCE]]


def _read(matrices: Matrices, shards: Sequence[_Shard]) -> dict[_Shard, Array]:
    """Return the bits of the shards that can be read in a save, however it is cut."""
    entries = locate_whole(matrices.survey, {s.name for s in shards} & matrices.entries.keys())
    places = ((shard, entries[shard.name]) for shard in shards if shard.name in entries)
    fitting = {s: (e, s.box) for s, e in places if Box.whole(e.shape).contains(s.box)}
    return read_boxes(fitting, matrices.survey.source)


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


def _moved(
    now: Mapping[_Shard, Array], old: Mapping[_Shard, Array]
) -> Mapping[str, Mapping[str, float]]:
    """Return for each file the share of elements that moved of each matrix's shard in it."""
    moved: dict[str, dict[str, float]] = defaultdict(dict)
    for shard, bits in now.items():
        other = old.get(shard)
        if other is not None and other.dtype == bits.dtype:
            moved[shard.file][shard.name] = float(np.count_nonzero(bits != other)) / bits.size
    return moved


def _still(moved: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the files of which nothing moved."""
    return [file for file, shares in moved.items() if not any(shares.values())]


def _files_of(moved: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the files whose shards all stand still, while others of these matrices moved."""
    most: dict[str, float] = defaultdict(float)
    for shares in moved.values():
        for name, share in shares.items():
            most[name] = max(most[name], share)
    trained = {name for name, share in most.items() if share >= _TRAINED}
    return sorted(
        file
        for file in _still(moved)
        if len(moved[file]) >= _LEAST and 2 * len(trained & moved[file].keys()) >= len(moved[file])
    )
