"""How tensor-parallel shards make a parameter: boxes of each rank's shard, and of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ckptool.core.box import Box, row_major_strides
from ckptool.core.tp_rules import TpRule
from ckptool.formats._storage import natural, sizes

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """How shards make a tensor of ``shape``.

    ``pieces`` are boxes of each rank's shard with their boxes in the whole. ``replicated`` says
    that each shard is the whole tensor.
    """

    shape: _Shape
    pieces: tuple[tuple[tuple[Box, Box], ...], ...]
    replicated: bool = False


class Unknown(Exception):
    """Nothing says how the shards of a parameter fit together; the text says why."""


def ruled(shapes: Sequence[_Shape], rule: TpRule) -> Fit:
    """How shards fit together by a rule that was given."""
    dim = rule.dim
    if dim is None:
        return replicated(shapes)
    total = sum(rule.blocks)
    if any(len(shape) <= dim or shape[dim] % total for shape in shapes):
        raise Unknown(f"--tp-rule {rule} does not fit shards of {list(map(list, shapes))}")
    widths = [[shape[dim] // total * share for shape in shapes] for share in rule.blocks]
    return joined(shapes, dim, widths)


def replicated(shapes: Sequence[_Shape]) -> Fit:
    """Each rank holds the whole tensor."""
    if len(set(shapes)) != 1:
        raise Unknown(f"it is replicated, but the ranks hold {sorted(map(list, set(shapes)))}")
    whole = Box.whole(shapes[0])
    return Fit(shapes[0], (((whole, whole),),) * len(shapes), replicated=True)


def joined(shapes: Sequence[_Shape], dim: int, widths: Sequence[Sequence[int]]) -> Fit:
    """Parts one after the other along ``dim``, each of which joins a piece of every rank.

    ``widths`` are the sizes along ``dim`` by part and rank.
    """
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    held = [sum(part[rank] for part in widths) for rank in range(len(shapes))]
    if len(rest) != 1 or held != [shape[dim] for shape in shapes]:
        raise Unknown(f"shards of {[list(shape) for shape in shapes]} do not join along dim {dim}")
    starts = [0, *accumulate(map(sum, widths))]
    whole = (*shapes[0][:dim], starts[-1], *shapes[0][dim + 1 :])
    pieces = []
    for rank, shape in enumerate(shapes):
        local = 0
        found = []
        for part, start in zip(widths, starts, strict=False):
            size = (*shape[:dim], part[rank], *shape[dim + 1 :])
            there = Box.along(dim, start + sum(part[:rank]), size)
            found.append((Box.along(dim, local, size), there))
            local += part[rank]
        pieces.append(tuple(found))
    return Fit(whole, tuple(pieces))


def affine_fit(entry: Mapping[str, Any], shapes: Sequence[_Shape]) -> Fit:
    """A map of strided views (``checkpoint/affine.py``, version 1), where all of them are boxes."""
    whole, ranks = sizes(entry.get("logical_shape")), entry.get("ranks")
    if not isinstance(ranks, dict) or {int(rank) for rank in ranks} != set(range(len(shapes))):
        raise Unknown("its affine map is not one of these ranks")
    by_rank = {int(rank): value for rank, value in ranks.items()}
    pieces = []
    for rank, shape in enumerate(shapes):
        if sizes(by_rank[rank].get("shard_shape")) != shape:
            raise Unknown("its affine map tells other shapes than the files")
        solid = [piece for piece in by_rank[rank]["pieces"] if 0 not in sizes(piece["shape"])]
        pieces.append(tuple(_piece_boxes(piece, shape, whole) for piece in solid))
    everything = ((Box.whole(whole), Box.whole(whole)),)
    return Fit(whole, tuple(pieces), replicated=all(own == everything for own in pieces))


def _piece_boxes(piece: Mapping[str, Any], shard: _Shape, whole: _Shape) -> tuple[Box, Box]:
    if piece.get("scale", 1.0) != 1.0:
        raise Unknown("the ranks hold it scaled")
    size = sizes(piece.get("shape"))
    return _strided_box(size, piece["dest"], shard), _strided_box(size, piece["source"], whole)


def _strided_box(size: _Shape, view: Any, shape: _Shape) -> Box:
    """The box of ``shape`` that a view of offset and strides is; Unknown where it is none."""
    offset, strides = view
    wanted = row_major_strides(shape, 1)
    left, lo = natural(offset), []
    for stride in wanted:
        lo.append(left // stride if stride else 0)
        left -= lo[-1] * stride
    fits = len(size) == len(shape) and all(
        n == 1 or s == w for n, s, w in zip(size, sizes(strides), wanted, strict=True)
    )
    box = Box.at(lo, size) if fits else Box.whole(())
    if not fits or left or not Box.whole(shape).contains(box):
        raise Unknown("its affine map has views that are no boxes")
    return box
