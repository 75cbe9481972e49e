"""What the content of files says of the ranks that wrote them.

The records of DTensors and ShardedTensors name their rank, FSDP1's flat parameters exist on ranks
only, and some trainers save ``rank`` beside the state.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, starmap

from ckptool.core.catalog import Extent
from ckptool.errors import CkptoolError
from ckptool.serialization.archive.dtensor import DTensorShare, Share
from ckptool.serialization.source import Source, expect_archives
from ckptool.serialization.state_dict.flat_params import is_flat
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, ShareLeaf, read_file_leaves

_VALUES = ("rank", "global_rank")
_ENOUGH = 4
"""So many files of one rank are no files of ranks, some of which were copied over others. And of so
many that all differ, none is a replica."""


def recorded_ranks(
    source: Source, files: Sequence[str], numbers: Sequence[int] | None
) -> list[int] | None:
    """Return the rank of each file; None if the files record none, or all record the same.

    ``numbers`` are the only ones in which the names differ. Then they count ranks, from 0 or 1, if
    the first files that can be read record two of them: another file may be damaged, or a copy.
    Names that differ in several have an order, which most of the files confirm.
    """
    if numbers is None:
        ranks = [_attempt(source, file, None) for file in files]
        if None not in ranks and len(set(ranks)) == len(ranks):
            return [rank for rank in ranks if rank is not None]
        confirmed = sum(rank == at for at, rank in enumerate(ranks))
        return list(range(len(ranks))) if 2 * confirmed > len(ranks) else None
    first = _first_number(source, sorted(zip(numbers, files, strict=True)))
    return None if first is None else [number - first for number in numbers]


def _first_number(source: Source, files: Sequence[tuple[int, str]]) -> int | None:
    """Return the number of rank 0, which is 0 or 1; None if the numbers count something else."""
    expect_archives(source, (file for _, file in files[:2]))
    ranks: dict[int, int] = {}
    for number, file in files:
        try:
            rank = _recorded_rank(source, file, number)
        except CkptoolError:
            continue
        if rank is None:
            return None
        ranks[number] = rank
        if len(set(ranks.values())) > 1 or len(ranks) == _ENOUGH:
            break
    if not ranks or (len(set(ranks.values())) == 1 and len(ranks) > 1):
        return None
    offsets = {number - rank for number, rank in ranks.items()}
    return next((first for first in (0, 1) if first in offsets), None)


def _attempt(source: Source, file: str, number: int | None) -> int | None:
    try:
        return _recorded_rank(source, file, number)
    except CkptoolError:
        return None


def _recorded_rank(source: Source, file: str, number: int | None) -> int | None:
    """Return the rank that a file records; ``number`` if it records only that it is one rank's."""
    leaves = read_file_leaves(source, file)
    shares = [leaf.value.share for leaf in leaves.values() if isinstance(leaf.value, ShareLeaf)]
    ranks = {share.rank for share in shares if share.rank is not None}
    if not ranks and (any(map(_is_part, shares)) or any(map(is_flat, leaves))):
        return number
    if not ranks:
        values = (leaves[name].value for name in _VALUES if name in leaves)
        ranks = {value for value in values if type(value) is int}
    return ranks.pop() if len(ranks) == 1 else None


def _is_part(share: Share) -> bool:
    """Return whether a share is of a tensor that several ranks have."""
    return not isinstance(share, DTensorShare) or share.mesh.size > 1


def are_processes(source: Source, files: Sequence[str], numbers: Collection[int]) -> bool:
    """Return whether files, the one of rank 0 not among them, are of processes.

    Their content says it, or whole tensors have at least the same shape in all of them.
    """
    try:
        contents = [read_file_leaves(source, file) for file in files]
    except CkptoolError:
        return True
    if any(map(_has_shards, contents)):
        return True
    return 1 in numbers and _have_equal_shapes(contents)


def have_slices(source: Source, files: Sequence[str], model: str) -> bool:
    """Return whether ranks' files, by the first of them, have slices of an optimizer, not replicas.

    Replicas are two files with equal tensors, or files that each have state of all matrices of the
    ``model``; a single file is none. False, too, if a file records which part of larger tensors it
    has. A file that cannot be read does not count.
    """
    contents: list[Mapping[str, Leaf]] = []
    for file in files:
        with suppress(CkptoolError):
            contents.append(read_file_leaves(source, file))
        if len(contents) == _ENOUGH:
            break
    if any(map(_has_shards, contents)) or len(contents) < min(2, len(files)):
        return False
    are_equal = any(starmap(_are_equal, combinations(contents, 2)))
    return len(files) == 1 or not (are_equal or _are_whole(contents, source, model))


def _are_whole(contents: Iterable[Mapping[str, Leaf]], source: Source, model: str) -> bool:
    """Return whether each kind of state in all files is of as many matrices as a model has.

    By their shapes: files of what each rank updates, rows or parameters, have fewer.
    """
    try:
        of_model = _shapes(read_file_leaves(source, model))
    except CkptoolError:
        return False
    kinds = defaultdict[object, dict[str, Leaf]](dict)
    for at, leaves in enumerate(contents):
        for name, leaf in leaves.items():
            kinds[at, name.rpartition(".")[2]][name] = leaf
    shapes = list(filter(None, map(_shapes, kinds.values())))
    return bool(shapes) and all(counts == of_model for counts in shapes)


def _shapes(leaves: Mapping[str, Leaf]) -> Counter[tuple[int, ...]]:
    """Return how many plain matrices there are of each shape."""
    values = (leaf.value for leaf in leaves.values())
    shapes = (value.tensor.shape for value in values if isinstance(value, PlainLeaf))
    return Counter(shape for shape in shapes if len(shape) > 1)


def _are_equal(one: Mapping[str, Leaf], other: Mapping[str, Leaf]) -> bool:
    """Return whether files have tensors of one name, and stored checksums say that all are equal.

    Steps, of one number, are equal on all ranks.
    """
    pairs = [(one[name].value, other[name].value) for name in one.keys() & other.keys()]
    contents = [
        (_content_of(a), _content_of(b))
        for a, b in pairs
        if isinstance(a, PlainLeaf) and isinstance(b, PlainLeaf) and math.prod(a.tensor.shape) > 1
    ]
    return bool(contents) and all(a is not None and a == b for a, b in contents)


def _content_of(leaf: PlainLeaf) -> object:
    """Return what headers say of a tensor, and of its bytes; None without their checksum."""
    tensor, place = leaf.tensor, leaf.place
    record = place.record if isinstance(place, Extent) and tensor.fills_storage else None
    return record and (tensor.dtype, tensor.shape, record.nbytes, record.crc32)


def _has_shards(leaves: Mapping[str, Leaf]) -> bool:
    return any(isinstance(leaf.value, ShareLeaf) or is_flat(name) for name, leaf in leaves.items())


def _have_equal_shapes(contents: Sequence[Mapping[str, Leaf]]) -> bool:
    """Return whether tensors of one name have the same shape in all files."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(
        shapes.setdefault(name, leaf.value.tensor.shape) == leaf.value.tensor.shape
        for leaves in contents
        for name, leaf in leaves.items()
        if isinstance(leaf.value, PlainLeaf)
    )
