"""How tensor-parallel shards fit together, as ``universal_checkpoint_info`` tells it.

Megatron-DeepSpeed and DeepSpeed's automatic tensor parallelism write it for DeepSpeed's own
universal checkpoints (``checkpoint/ds_to_universal.py``, 0.19): patterns of parameters that are
replicated, cut along dim 1, or made of several parts; all others are cut along dim 0. Without it
nothing in the files tells how shards fit together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptool.core.box import Box, row_major_strides
from ckptool.core.sharding.tensor_parallel import (
    COLUMN,
    GATED,
    REPLICATED,
    ROW,
    Fit,
    Shape,
    fit_blocks,
    fit_ranks,
)
from ckptool.errors import Undetermined, Unsupported
from ckptool.serialization.archive.tensors import natural, sizes
from ckptool.serialization.pickle.records import Call, Global

_LONGEST = 1000
_MOST_REPEATS = 4
_SUB_PARAM_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
_REPEATED_GROUP = re.compile(r"\)\s*[*+?{]")


def fit_shards(name: str, shapes: Sequence[Shape], info: Mapping[str, Any]) -> list[Fit]:
    """Return how the shards of ``shapes``, by tensor-parallel rank, make a parameter.

    Raises Undetermined where the file does not tell, or tells what no copy of bytes can do.
    """
    if not info:
        raise Undetermined("no universal_checkpoint_info says how they were cut")
    for pattern, reason in _mapping(info, "autotp_unsupported_parameter_patterns").items():
        if _matches(str(pattern), name):
            raise Undetermined(str(reason))
    affine = _matching_map(name, info)
    if affine is not None:
        return fit_affine_map(affine, shapes)
    if _listed(name, info, "tp_replicated_parameter_patterns"):
        return fit_ranks(shapes, REPLICATED)
    if _listed(name, info, "parameter_to_average_patterns"):
        raise Undetermined("ranks hold different values, which DeepSpeed averages")
    if _listed(name, info, "parameter_with_2_sub_params_cat_dim_0"):
        return fit_ranks(shapes, GATED)
    parts = _sub_params(name, info)
    if parts is not None:
        return _fit_of_parts(name, parts, shapes, info)
    rows = _listed(name, info, "parameter_with_row_parallelism_patterns")
    return fit_ranks(shapes, ROW if rows else COLUMN)


# Parameters made of several parts


def _sub_params(name: str, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for entry in info.get("parameter_with_sub_params") or []:
        fields = entry if isinstance(entry, dict) else getattr(entry, "fields", {})
        if any(_matches(str(pattern), name) for pattern in fields.get("patterns") or []):
            return fields
    return None


def _fit_of_parts(
    name: str, parts: Mapping[str, Any], shapes: Sequence[Shape], info: Mapping[str, Any]
) -> list[Fit]:
    dim = natural(parts.get("partition_dim"))
    spec = parts.get("shape")
    if not isinstance(spec, list | tuple) or len(spec) != len(shapes[0]):
        raise Undetermined("its parts have a different shape from its own")
    widths = next(
        (
            [list(map(natural, part)) for part in stored]
            for pattern, stored in _mapping(info, "sub_param_shard_widths").items()
            if _matches(str(pattern), name)
        ),
        None,
    )
    return fit_blocks(
        shapes, dim, widths or _even_widths(spec[dim], sum(s[dim] for s in shapes), shapes)
    )


def _even_widths(spec: Any, total: int, shapes: Sequence[Shape]) -> list[list[int]]:
    """Even cuts, from the parts' sizes or from their number alone (before version 0.4)."""
    if isinstance(spec, int):
        spec = (total // spec,) * spec if spec and not total % spec else ()
    parts, ranks = sizes(spec), len(shapes)
    if sum(parts) != total or any(part % ranks for part in parts):
        raise Undetermined(f"parts of {list(parts)} cannot be cut evenly among {ranks} ranks")
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
        raise Unsupported(f"universal_checkpoint_info: the pattern {pattern[:80]!r} is too long")
    if _REPEATED_GROUP.search(pattern):
        raise Unsupported(f"universal_checkpoint_info: {pattern[:80]!r} repeats a group")
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError):
        raise Unsupported(f"universal_checkpoint_info: {pattern[:80]!r} is not a pattern") from None


# Universal checkpoints


def tensor_parallel_layout(name: str, shape: Shape, info: Mapping[str, Any]) -> dict[str, Any]:
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


def _sub_param_shape(parts: Mapping[str, Any], shape: Shape) -> Call:
    """DeepSpeed's own record of a parameter's parts (``checkpoint/universal_checkpoint.py``)."""
    dim, spec = natural(parts.get("partition_dim")), parts.get("shape")
    if not isinstance(spec, list | tuple) or dim >= min(len(spec), len(shape)):
        raise Unsupported(
            "universal_checkpoint_info: parts of another shape than their parameter's"
        )
    count = spec[dim]
    widths = (shape[dim] // count,) * count if isinstance(count, int) and count else count
    record = Call(_SUB_PARAM_SHAPE, (), is_new=True)
    record.state = {
        "patterns": list(parts.get("patterns") or []),
        "shape": (*spec[:dim], widths, *spec[dim + 1 :]),
        "partition_dim": dim,
    }
    return record


def kept_rows(name: str, shape: Shape, info: Mapping[str, Any]) -> int:
    """Return the rows of a parameter without the padding of a vocabulary."""
    original = info.get("original_vocab_size")
    if type(original) is not int or not _listed(name, info, "vocabulary_parameter_patterns"):
        return shape[0]
    return min(shape[0], original)


def fit_affine_map(entry: Mapping[str, Any], shapes: Sequence[Shape]) -> list[Fit]:
    """A map of strided views (``checkpoint/affine.py``, version 1), where all of them are boxes."""
    whole, ranks = sizes(entry.get("logical_shape")), entry.get("ranks")
    if not isinstance(ranks, dict) or {int(rank) for rank in ranks} != set(range(len(shapes))):
        raise Undetermined("its affine map is for different ranks")
    by_rank = {int(rank): value for rank, value in ranks.items()}
    fits = []
    for rank, shape in enumerate(shapes):
        if sizes(by_rank[rank].get("shard_shape")) != shape:
            raise Undetermined("its affine map has different shapes from the files")
        solid = [piece for piece in by_rank[rank]["pieces"] if 0 not in sizes(piece["shape"])]
        pieces = tuple(_piece_boxes(piece, shape, whole) for piece in solid)
        fits.append(Fit(shape, whole, pieces))
    return fits


def _piece_boxes(piece: Mapping[str, Any], shard: Shape, whole: Shape) -> tuple[Box, Box]:
    if piece.get("scale", 1.0) != 1.0:
        raise Undetermined("the ranks hold it scaled")
    size = sizes(piece.get("shape"))
    return _strided_box(size, piece["dest"], shard), _strided_box(size, piece["source"], whole)


def _strided_box(size: Shape, view: Any, shape: Shape) -> Box:
    """Return the box of ``shape`` that a view of offset and strides is.

    Raises Undetermined where it is none.
    """
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
        raise Undetermined("its affine map has views that are not boxes")
    return box
