"""How tensor-parallel shards fit together, and their merge into whole tensors.

Megatron-DeepSpeed and DeepSpeed's automatic tensor parallelism write ``universal_checkpoint_info``
for DeepSpeed's own universal checkpoints (``checkpoint/ds_to_universal.py``, 0.19): patterns of
parameters that are replicated, cut along dim 1, or made of several parts; all others are cut along
dim 0. Without it the files do not record how shards fit together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptool.core.box import Box, Piece, row_major_strides
from ckptool.core.catalog import RankStep, TensorEntry, merge_copies
from ckptool.core.sharding.tensor_parallel import (
    COLUMN,
    GATED,
    REPLICATED,
    ROW,
    Fit,
    Shape,
    TpRule,
    fit_blocks,
    fit_ranks,
    given_rules,
    merge_shards,
    report_unmerged,
)
from ckptool.core.text import compile_stated
from ckptool.errors import Damaged, Refusal, Undetermined, Unsupported
from ckptool.formats.base import ScanOptions
from ckptool.formats.deepspeed.checkpoint import Grid
from ckptool.formats.deepspeed.flat_runs import MODEL_KINDS, Name, RankContents, RankShard
from ckptool.serialization.archive.tensors import read_natural, read_sizes
from ckptool.serialization.pickle.records import Call, Global, new_object
from ckptool.serialization.state_dict.leaves import Assembled

_TIED = "tied_modules."
_LONGEST = 1.0
"""Seconds of the processor for one pattern and one name."""
_MOST_PARTS = 1 << 12
"""Parts of one parameter, such as its heads or experts, of which a file may say any number."""
_RULES = {
    "tp_replicated_parameter_patterns": REPLICATED,
    "parameter_with_2_sub_params_cat_dim_0": GATED,
    "parameter_with_row_parallelism_patterns": ROW,
}
_SUB_PARAM_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


def merge_contents(
    assembled: Assembled,
    contents: Sequence[RankContents],
    grid: Grid,
    info: Mapping[str, Any],
    options: ScanOptions,
) -> None:
    """Add the tensors of all model-parallel ranks to the assembled ones.

    Shards without a known rule become conflicts, or ``NAME@rankR`` with ``per_rank``. A user's rule
    precedes ``info``, which is ``universal_checkpoint_info``. A rank's refusals are skipped.
    """
    names = dict.fromkeys(name for rank in contents for name in rank.tensors)
    refused = {n for n, why in assembled.conflicts.items() if isinstance(why, Refusal)}
    user_rules = given_rules(options.tp_rules, {parameter for _, parameter in names})
    for name in names:
        text = ".".join(name)
        if text in refused:
            continue
        try:
            shards = _select_shards(name, contents, grid)
        except Damaged as error:
            if not refused:
                raise
            assembled.conflicts[text] = _refuse_lacking(name, error)
            continue
        try:
            assembled.tensors[text] = merge_tensor(name, shards, info, user_rules(name[1]))
        except Undetermined as why:
            if options.per_rank:
                assembled.tensors |= _list_unmerged(name, shards, grid)
            else:
                shapes = [shard.shape for shard in shards.values()]
                conflict = report_unmerged(text, name[1], shapes, why, "sharding-unrecorded")
                assembled.conflicts[text] = conflict


def _refuse_lacking(name: Name, error: Damaged) -> Refusal:
    """Return why a tensor is refused if a rank has no shard of it, and ranks refuse some."""
    text, why = ".".join(name), error.message
    refusal = Refusal(why, why.code, file=why.file, tensor=text)
    refusal.part = "model" if name[0] in MODEL_KINDS else "optimizer"
    refusal.derived = True
    return refusal


def _select_shards(
    name: Name, contents: Sequence[RankContents], grid: Grid
) -> dict[int, RankShard]:
    """Return the shards of the first stage with a tensor, by ``mp`` rank.

    Only tied modules are in several stages, which keep them equal. Automatic tensor parallelism
    gives a rank without heads an empty shard, which its optimizer omits.
    """
    shards = {mp: c.tensors[name] for mp, c in enumerate(contents) if name in c.tensors}
    dtype = next(iter(shards.values())).dtype
    for mp, rank in enumerate(contents):
        weight = rank.tensors.get(("module", name[1]))
        if mp not in shards and weight is not None and not math.prod(weight.shape):
            shards[mp] = RankShard(dtype, weight.shape)
    stages = sorted({mp // grid.tensor for mp in shards})
    if len(stages) > 1 and not name[1].startswith(_TIED):
        raise Damaged(
            f"{'.'.join(name)}: pipeline stages {stages} store it, but it is not tied",
            "ranks-disagree",
        )
    ranks = range(stages[0] * grid.tensor, (stages[0] + 1) * grid.tensor)
    missing = [mp for mp in ranks if mp not in shards]
    if missing:
        message = f"{'.'.join(name)}: mp_rank {missing[0]:02d} has no shard of it"
        raise Damaged(message, "rank-missing", tensor=".".join(name))
    return {mp: shards[mp] for mp in ranks}


def merge_tensor(
    name: Name,
    shards: Mapping[int, RankShard],
    info: Mapping[str, Any] | None = None,
    rule: TpRule | None = None,
) -> TensorEntry:
    """Return the tensor that shards form, by ``mp`` rank. Raises Undetermined, see ``fit_shards``.

    Raises Damaged if ranks have several dtypes for it.
    """
    ranks, text = list(shards.values()), ".".join(name)
    if len(ranks) == 1:
        (shard,) = ranks
        return TensorEntry(text, name, shard.dtype, shard.shape, merge_copies(shard.chunks))
    if len({shard.dtype for shard in ranks}) > 1:
        message = f"{text}: tensor-parallel ranks store it with different dtypes"
        raise Damaged(message, "ranks-disagree", tensor=text)
    shapes = [shard.shape for shard in ranks]
    fits = fit_shards(name[1], shapes, info or {}) if rule is None else fit_ranks(shapes, rule)
    if all(fit.is_whole for fit in fits):  # ZeRO may cut the copies of a tensor differently
        boxes = {chunk.box for chunk in ranks[0].chunks}
        ranks = [shard for shard in ranks if {chunk.box for chunk in shard.chunks} == boxes]
    tensors = [TensorEntry(text, name, shard.dtype, shard.shape, shard.chunks) for shard in ranks]
    return merge_shards(text, name, tensors, fits[: len(ranks)])


def _list_unmerged(
    name: Name, shards: Mapping[int, RankShard], grid: Grid
) -> dict[str, TensorEntry]:
    """Return each rank's shard as a separate tensor, ``NAME@rankR``."""
    entries = {}
    for mp, shard in shards.items():
        rank = grid.rank(0, mp)
        text = f"{'.'.join(name)}@rank{rank}"
        path = (name[0], RankStep(name[1], rank))
        chunks = merge_copies(shard.chunks)
        entries[text] = TensorEntry(text, path, shard.dtype, shard.shape, chunks)
    return entries


# How shards fit together


def fit_shards(name: str, shapes: Sequence[Shape], info: Mapping[str, Any]) -> list[Fit]:
    """Return how the shards of ``shapes``, by tensor-parallel rank, form a parameter.

    Raises Undetermined if the file does not record it, or records what no copy of bytes can do.
    """
    if not info:
        raise Undetermined("no universal_checkpoint_info records how they were cut")
    for reason in _find_matching(info.get("autotp_unsupported_parameter_patterns"), name):
        raise Undetermined(str(reason))
    affine = info.get("affine_map")
    params = affine.get("params") if isinstance(affine, dict) else None
    if params and not isinstance(params, dict):
        message = "universal_checkpoint_info: the params of affine_map are not a dict of patterns"
        raise Damaged(message, "metadata-unreadable")
    for entry in _find_matching(params, name):
        if isinstance(entry, dict):
            return _fit_affine_map(entry, shapes)
    rule = _find_listed_rule(name, info)
    if rule != REPLICATED and _is_listed(name, info, "parameter_to_average_patterns"):
        raise Undetermined("ranks hold different values, which DeepSpeed averages")
    parts = _find_sub_params(name, info)
    if parts is not None and rule in (ROW, COLUMN):
        return _fit_of_parts(name, parts, shapes, info)
    return fit_ranks(shapes, rule)


def _find_listed_rule(name: str, info: Mapping[str, Any]) -> TpRule:
    return next((rule for key, rule in _RULES.items() if _is_listed(name, info, key)), COLUMN)


def _find_sub_params(name: str, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for entry in info.get("parameter_with_sub_params") or []:
        fields = entry if isinstance(entry, dict) else getattr(entry, "fields", {})
        if any(_matches(str(pattern), name) for pattern in fields.get("patterns") or []):
            return fields
    return None


def _fit_of_parts(
    name: str, parts: Mapping[str, Any], shapes: Sequence[Shape], info: Mapping[str, Any]
) -> list[Fit]:
    dim = read_natural(parts.get("partition_dim"))
    spec = parts.get("shape")
    if not isinstance(spec, list | tuple) or len(spec) != len(shapes[0]):
        raise Undetermined("its parts have a different shape from its own")
    stored = next(_find_matching(info.get("sub_param_shard_widths"), name), None)
    widths = [list(map(read_natural, part)) for part in stored or ()]
    if not widths:
        widths = _cut_evenly(spec[dim], sum(shape[dim] for shape in shapes), shapes)
    return fit_blocks(shapes, dim, widths)


def _cut_evenly(spec: Any, total: int, shapes: Sequence[Shape]) -> list[list[int]]:
    """Return even cuts, from the parts' sizes or only their number (before version 0.4)."""
    ranks = len(shapes)
    if isinstance(spec, int):
        parts = (total // spec,) * spec if 0 < spec <= _MOST_PARTS and not total % spec else ()
    else:
        parts = read_sizes(spec)
    if sum(parts) != total or any(part % ranks for part in parts):
        raise Undetermined(f"parts of {list(parts)} cannot be cut evenly among {ranks} ranks")
    return [[part // ranks] * ranks for part in parts]


def _fit_affine_map(entry: Mapping[str, Any], shapes: Sequence[Shape]) -> list[Fit]:
    """Return the fits of a map of strided views (``checkpoint/affine.py``, version 1)."""
    whole, ranks = read_sizes(entry.get("logical_shape")), entry.get("ranks")
    if not isinstance(ranks, dict) or {int(rank) for rank in ranks} != set(range(len(shapes))):
        raise Undetermined("its affine map is for different ranks")
    by_rank = {int(rank): value for rank, value in ranks.items()}
    fits = []
    for rank, shape in enumerate(shapes):
        if read_sizes(by_rank[rank].get("shard_shape")) != shape:
            raise Undetermined("its affine map has different shapes from the files")
        solid = [piece for piece in by_rank[rank]["pieces"] if 0 not in read_sizes(piece["shape"])]
        pieces = tuple(_place_piece(piece, shape, whole) for piece in solid)
        fits.append(Fit(shape, whole, pieces))
    return fits


def _place_piece(piece: Mapping[str, Any], shard: Shape, whole: Shape) -> Piece:
    if piece.get("scale", 1.0) != 1.0:
        raise Undetermined("ranks store it scaled")
    size = read_sizes(piece.get("shape"))
    box = _find_strided_box(size, piece["source"], whole)
    return Piece(box, _find_strided_box(size, piece["dest"], shard))


def _find_strided_box(size: Shape, view: Any, shape: Shape) -> Box:
    """Return the box of ``shape`` that is a view of offset and strides; Undetermined for none."""
    offset, strides = view
    plain_strides = row_major_strides(shape, 1)
    remainder, lo = read_natural(offset), []
    for stride in plain_strides:
        lo.append(remainder // stride if stride else 0)
        remainder -= lo[-1] * stride
    fits = len(size) == len(shape) and all(
        n == 1 or s == w for n, s, w in zip(size, read_sizes(strides), plain_strides, strict=True)
    )
    box = Box.at(lo, size) if fits else Box.whole(())
    if not fits or remainder or not Box.whole(shape).contains(box):
        raise Undetermined("its affine map has views that are not boxes")
    return box


# Patterns


def _find_matching(values: Any, name: str) -> Iterator[Any]:
    """Yield the values of a dict's patterns that match the name; none if it is not a dict."""
    for pattern, value in values.items() if isinstance(values, dict) else ():
        if _matches(str(pattern), name):
            yield value


def _is_listed(name: str, info: Mapping[str, Any], key: str) -> bool:
    patterns = (pattern for pattern in info.get(key) or [] if isinstance(pattern, str))
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    """Match a name from its start. Raises Unsupported for an invalid pattern, or a slow one."""
    what = f"universal_checkpoint_info: pattern {pattern[:80]!r}"
    try:
        return compile_stated(pattern).match(name, timeout=_LONGEST) is not None
    except re.error as error:
        raise Unsupported(f"{what}: {error}") from None
    except TimeoutError:
        message = f"{what} takes more than {_LONGEST:g} s to match {name}"
        raise Unsupported(message, "limit-exceeded") from None


# Universal checkpoints


def describe_cut(name: str, shape: Shape, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's cut by DeepSpeed's keys, for a universal checkpoint's file."""
    parts = _find_sub_params(name, info)
    if parts is not None:
        return {"sub_param_shape": _record_sub_params(parts, shape)}
    vocabulary = _is_listed(name, info, "vocabulary_parameter_patterns")
    fields: dict[str, Any] = {"vocab_tensor": True} if vocabulary else {}
    rule = _find_listed_rule(name, info)
    fields |= {} if rule.dim is None else {"cat_dim": rule.dim}
    return fields | ({"param_n_sub_params": 2} if rule == GATED else {})


def _record_sub_params(parts: Mapping[str, Any], shape: Shape) -> Call:
    """Return DeepSpeed's record of a parameter's parts (``checkpoint/universal_checkpoint.py``)."""
    dim, spec = read_natural(parts.get("partition_dim")), parts.get("shape")
    if not isinstance(spec, list | tuple) or dim >= min(len(spec), len(shape)):
        raise Unsupported(
            "universal_checkpoint_info: the parts differ in shape from their parameter"
        )
    count = spec[dim]
    if isinstance(count, int) and not 0 < count <= _MOST_PARTS:
        raise Unsupported(f"universal_checkpoint_info: a parameter of {count:,} parts")
    widths = (shape[dim] // count,) * count if isinstance(count, int) else count
    return new_object(
        _SUB_PARAM_SHAPE,
        patterns=list(parts.get("patterns") or []),
        shape=(*spec[:dim], widths, *spec[dim + 1 :]),
        partition_dim=dim,
    )


def count_kept_rows(name: str, shape: Shape, info: Mapping[str, Any]) -> int:
    """Return the rows of a parameter without the padding of a vocabulary."""
    original = info.get("original_vocab_size")
    if type(original) is not int or not _is_listed(name, info, "vocabulary_parameter_patterns"):
        return shape[0]
    return min(shape[0], original)
