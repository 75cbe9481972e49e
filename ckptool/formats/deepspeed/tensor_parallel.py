"""How tensor-parallel shards fit together, as ``universal_checkpoint_info`` tells it.

Megatron-DeepSpeed and DeepSpeed's automatic tensor parallelism write it for DeepSpeed's own
universal checkpoints (``checkpoint/ds_to_universal.py``, 0.19): patterns of parameters that are
replicated, cut along dim 1, or made of several parts; all others are cut along dim 0. Without it
nothing in the files tells how shards fit together.

How tensor-parallel shards make a parameter: boxes of each rank's shard, and of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ckptool.core.box import Box, row_major_strides
from ckptool.core.sharding.tensor_parallel import TpRule, how_to_say
from ckptool.errors import CannotDo
from ckptool.serialization.archive.storage import natural, sizes
from ckptool.serialization.pickle.records import Call, Global

_Shape = tuple[int, ...]
_LONGEST = 1000
_MOST_REPEATS = 4
_SUB_PARAM_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
_REPEATED_GROUP = re.compile(r"\)\s*[*+?{]")


def fit_of(name: str, shapes: Sequence[_Shape], info: Mapping[str, Any]) -> Fit:
    """How the shards of ``shapes``, by tensor-parallel rank, make a parameter.

    Raises Unknown where the file does not tell, or tells what no copy of bytes can do.
    """
    if not info:
        raise Unknown(f"no universal_checkpoint_info says how they were cut; {how_to_say(name)}")
    for pattern, reason in _mapping(info, "autotp_unsupported_parameter_patterns").items():
        if _matches(str(pattern), name):
            raise Unknown(str(reason))
    affine = _matching_map(name, info)
    if affine is not None:
        return affine_fit(affine, shapes)
    if _listed(name, info, "tp_replicated_parameter_patterns"):
        return replicated(shapes)
    if _listed(name, info, "parameter_to_average_patterns"):
        raise Unknown("each rank has values of its own, of which DeepSpeed takes the mean")
    if _listed(name, info, "parameter_with_2_sub_params_cat_dim_0"):
        return joined(shapes, 0, [[shape[0] // 2 for shape in shapes]] * 2)
    parts = _sub_params(name, info)
    if parts is not None:
        return _fit_of_parts(name, parts, shapes, info)
    dim = 1 if _listed(name, info, "parameter_with_row_parallelism_patterns") else 0
    if any(len(shape) <= dim for shape in shapes):
        raise Unknown(f"it has no dim {dim} to be cut along")
    return joined(shapes, dim, [[shape[dim] for shape in shapes]])


# Parameters made of several parts


def _sub_params(name: str, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for entry in info.get("parameter_with_sub_params") or []:
        fields = entry if isinstance(entry, dict) else getattr(entry, "fields", {})
        if any(_matches(str(pattern), name) for pattern in fields.get("patterns") or []):
            return fields
    return None


def _fit_of_parts(
    name: str, parts: Mapping[str, Any], shapes: Sequence[_Shape], info: Mapping[str, Any]
) -> Fit:
    dim = natural(parts.get("partition_dim"))
    spec = parts.get("shape")
    if not isinstance(spec, list | tuple) or len(spec) != len(shapes[0]):
        raise Unknown("its parts are told in another shape than its own")
    widths = next(
        (
            [list(map(natural, part)) for part in stored]
            for pattern, stored in _mapping(info, "sub_param_shard_widths").items()
            if _matches(str(pattern), name)
        ),
        None,
    )
    return joined(
        shapes, dim, widths or _even_widths(spec[dim], sum(s[dim] for s in shapes), shapes)
    )


def _even_widths(spec: Any, total: int, shapes: Sequence[_Shape]) -> list[list[int]]:
    """Even cuts, from the parts' sizes or from their number alone (before version 0.4)."""
    if isinstance(spec, int):
        spec = (total // spec,) * spec if spec and not total % spec else ()
    parts, ranks = sizes(spec), len(shapes)
    if sum(parts) != total or any(part % ranks for part in parts):
        raise Unknown(f"parts of {list(parts)} cannot be cut evenly among {ranks} ranks")
    return [[part // ranks] * ranks for part in parts]


def _matching_map(name: str, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stored = info.get("affine_map")
    params = stored.get("params") if isinstance(stored, dict) else None
    for pattern, entry in (params or {}).items():
        if _matches(str(pattern), name) and isinstance(entry, dict):
            return entry
    return None


# Patterns


def _mapping(info: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    value = info.get(key)
    return value if isinstance(value, dict) else {}


def _listed(name: str, info: Mapping[str, Any], key: str) -> bool:
    patterns = info.get(key)
    found: Iterator[str] = (p for p in patterns or [] if isinstance(p, str))
    return any(_matches(pattern, name) for pattern in found)


def _matches(pattern: str, name: str) -> bool:
    """``re.match``, for patterns that take no more than a moment."""
    repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    if len(pattern) + len(name) > _LONGEST or repeats > _MOST_REPEATS:
        raise CannotDo(f"universal_checkpoint_info: the pattern {pattern[:80]!r} is too long")
    if _REPEATED_GROUP.search(pattern):
        raise CannotDo(f"universal_checkpoint_info: {pattern[:80]!r} repeats a group")
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError):
        raise CannotDo(f"universal_checkpoint_info: {pattern[:80]!r} is no pattern") from None


# Universal checkpoints


def tensor_parallel_layout(name: str, shape: _Shape, info: Mapping[str, Any]) -> dict[str, Any]:
    """What a universal checkpoint's file says of how a parameter is cut for tensor parallelism."""
    found: dict[str, Any] = {}
    parts = _sub_params(name, info)
    if parts is not None:
        return {"sub_param_shape": _sub_param_shape(parts, shape)}
    if _listed(name, info, "vocabulary_parameter_patterns"):
        found["vocab_tensor"] = True
    if _listed(name, info, "tp_replicated_parameter_patterns"):
        return found
    if _listed(name, info, "parameter_with_2_sub_params_cat_dim_0"):
        return found | {"cat_dim": 0, "param_n_sub_params": 2}
    rows = _listed(name, info, "parameter_with_row_parallelism_patterns")
    return found | {"cat_dim": 1 if rows else 0}


def _sub_param_shape(parts: Mapping[str, Any], shape: _Shape) -> Call:
    """DeepSpeed's own record of a parameter's parts (``checkpoint/universal_checkpoint.py``)."""
    dim, spec = natural(parts.get("partition_dim")), parts.get("shape")
    if not isinstance(spec, list | tuple) or dim >= min(len(spec), len(shape)):
        raise CannotDo("universal_checkpoint_info: parts of another shape than their parameter's")
    count = spec[dim]
    widths = (shape[dim] // count,) * count if isinstance(count, int) and count else count
    record = Call(_SUB_PARAM_SHAPE, (), is_new=True)
    record.state = {
        "patterns": list(parts.get("patterns") or []),
        "shape": (*spec[:dim], widths, *spec[dim + 1 :]),
        "partition_dim": dim,
    }
    return record


def kept_rows(name: str, shape: _Shape, info: Mapping[str, Any]) -> int:
    """The rows of a parameter without the padding of a vocabulary."""
    original = info.get("original_vocab_size")
    if type(original) is not int or not _listed(name, info, "vocabulary_parameter_patterns"):
        return shape[0]
    return min(shape[0], original)


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
