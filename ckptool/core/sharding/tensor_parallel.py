"""Merge tensor-parallel ranks' shards: rules by name, the boxes they make, the merged tensor.

Each framework has a ``RuleTable`` of how it cuts its tensors; ``--tp-rule`` replaces it elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.box import Box, Piece, pieces_of_runs, without_dim
from ckptool.core.catalog import Chunk, Path, TensorEntry, merge_copies
from ckptool.core.mesh import Mesh, Replicate, Shard
from ckptool.core.selection import is_used, meant_by, unmatched
from ckptool.core.views import part_of_chunk
from ckptool.errors import CkptoolError, Damaged, Problem, Undetermined, UsageError

Shape = tuple[int, ...]
_Facts = TypeVar("_Facts")


class TpRule(Struct, frozen=True):
    """Each rank holds a part along ``dim`` of each of several blocks; None: all of it.

    ``blocks`` are their sizes along ``dim``, as shares of a rank's part. A gated ``linear_fc1`` has
    two equal ones, gate and up: rank r holds ``[gate_r; up_r]``. ``holders`` consecutive ranks hold
    each part, as for key-value heads if there are fewer heads than ranks.
    """

    dim: int | None = None
    blocks: tuple[int, ...] = (1,)
    holders: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate()"
        count = len(self.blocks)
        return f"Shard({self.dim})" if count == 1 else f"Shard({self.dim}, {count})"


REPLICATED, COLUMN, ROW, GATED = TpRule(), TpRule(0), TpRule(1), TpRule(0, (1, 1))
NamedRule = tuple[str, TpRule]
GivenRules = Callable[[str], TpRule | None]
"""The rule that the user gave for a parameter, if any."""
_WORDS = {
    "replicate": REPLICATED,
    "Replicate": REPLICATED,
    "Replicate()": REPLICATED,
    "column": COLUMN,
    "row": ROW,
    "gated": GATED,
}
_SHARD = re.compile(r"Shard\(\s*([0-7])\s*(?:,\s*([1-9][0-9]?)\s*)?\)")


def parse_tp_rule(text: str) -> NamedRule:
    """Return a name and its rule, of ``NAME=RULE``; UsageError if it is none.

    RULE is ``replicate``, ``column`` (``Shard(0)``), ``row`` (``Shard(1)``), ``gated``
    (``Shard(0, 2)``: two blocks, each sharded), or ``Shard(dim)`` or ``Shard(dim, blocks)``.
    """
    glob, _, right = text.rpartition("=")
    word = right.strip()
    match = _SHARD.fullmatch(word)
    rule = TpRule(int(match[1]), (1,) * int(match[2] or 1)) if match else _WORDS.get(word)
    if not glob.strip() or rule is None:
        raise UsageError(
            f"--tp-rule {text!r} is not NAME=RULE",
            hint="RULE is replicate, column, row, gated, Shard(dim) or Shard(dim, blocks)",
        )
    return glob.strip(), rule


def parse_tp_rules(texts: Sequence[str] | None) -> tuple[NamedRule, ...]:
    """Return the rules of an option that may be given several times; the first match wins."""
    return tuple(map(parse_tp_rule, texts or ()))


def suggest_rule(name: str) -> str:
    """Return what to add to the command if no rule says how to merge ranks' shards."""
    return (
        f"--tp-rule '{name}=RULE' sets it: column (shards follow one another along dim 0), row"
        " (along dim 1), gated (in each of two halves of dim 0), replicate (all are the same), or"
        " Shard(dim)"
    )


def report_unmerged(
    name: str, parameter: str, shapes: Sequence[Shape], why: CkptoolError, code: str
) -> Problem:
    """Return why the shards of ranks, which have these shapes, are not merged."""
    message = f"{name}: cannot merge the ranks' shards ({list_shapes(shapes)}): {why.message}"
    return Problem(f"{message}; {suggest_rule(parameter)}", code, tensor=name)


def given_rules(rules: Sequence[NamedRule], names: Collection[str]) -> GivenRules:
    """Return the given rule of a parameter, None without one: the first that means its name.

    Raises UsageError if one means none of the ``names`` of all parameters.
    """
    for pattern, _ in rules:
        if not is_used(pattern, names):
            raise unmatched("--tp-rule", pattern, names, "parameter")
    meant = [(meant_by([pattern], names), rule) for pattern, rule in rules]
    return lambda name: next((rule for is_meant, rule in meant if is_meant(name)), None)


Resolver = Callable[[re.Match[str], _Facts], TpRule | None]


class RuleTable(Struct, Generic[_Facts], frozen=True):
    """How a framework cuts its tensors: the first pattern that matches a whole name decides.

    A rule may also be a function of the match and of other facts, for cuts that depend on sizes; if
    it returns None, later patterns are tried.
    """

    framework: str
    rows: tuple[tuple[re.Pattern[str], TpRule | Resolver[_Facts]], ...]

    def find(self, name: str, facts: _Facts) -> TpRule:
        """Return the rule of a tensor. Raises Undetermined if no pattern matches."""
        for pattern, row in self.rows:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            rule = row if isinstance(row, TpRule) else row(match, facts)
            if rule is not None:
                return rule
        raise Undetermined(f"no rule says how {self.framework} cuts it for tensor parallelism")


class RankCut(Struct, frozen=True):
    """One rank's share along one dim: the ``index``-th of ``degree``, of each of ``blocks``.

    ``blocks`` are their sizes, as shares of the rank's part.
    """

    dim: int
    index: int
    degree: int
    blocks: tuple[int, ...] = (1,)


class Fit(Struct, frozen=True):
    """Where a rank's shard of ``local`` shape belongs in the tensor of shape ``whole``."""

    local: Shape
    whole: Shape
    pieces: tuple[Piece, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole tensor."""
        box = Box.whole(self.whole)
        return self.pieces == ((box, box),)

    def place(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield the parts of the whole tensor that a chunk of the shard holds."""
        is_empty = not Box.whole(self.whole).volume
        for whole, local in self.pieces:
            common = chunk.box.intersect(local)
            if is_empty and chunk.box.contains(local):
                common = local  # empty boxes share nothing, but still have a place
            if common is not None:
                shift = [low - high for low, high in zip(local.lo, whole.lo, strict=True)]
                first = common.relative_to(chunk.box.lo).lo
                yield part_of_chunk(chunk, common.relative_to(shift), first)


Block = tuple[int, int, int]
"""A block's size along a dim: of the rank's part, of the parts of ranks before, of all."""


def _fit(local: Shape, blocks: Mapping[int, Sequence[Block]]) -> Fit:
    """Return the fit of a shard that is made of ``blocks`` along each of their dims."""
    whole, runs = list(local), [[(0, 0, size)] for size in local]
    for dim, dim_blocks in blocks.items():
        whole[dim], runs[dim], at = 0, [], 0
        for size, offset, total in dim_blocks:
            runs[dim].append((whole[dim] + offset, at, size))
            whole[dim], at = whole[dim] + total, at + size
    return Fit(local, tuple(whole), pieces_of_runs(runs))


def fit_rank(local: Shape, cuts: Sequence[RankCut]) -> Fit:
    """Return where one rank's shard belongs if each rank has one of the same shape.

    Raises Undetermined if a dim has no such blocks.
    """
    blocks = {}
    for cut in cuts:
        share, rest = divmod(sum(local[cut.dim : cut.dim + 1]), sum(cut.blocks))
        if rest or cut.dim >= len(local):
            ratio = " : ".join(map(str, cut.blocks))
            raise Undetermined(f"{list(local)} has no blocks of {ratio} along dim {cut.dim}")
        sizes = [share * block for block in cut.blocks]
        blocks[cut.dim] = [(size, size * cut.index, size * cut.degree) for size in sizes]
    return _fit(local, blocks)


def fit_ranks(shapes: Sequence[Shape], rule: TpRule) -> list[Fit]:
    """Return where each rank's shard belongs by a rule.

    Raises Undetermined if shards of these shapes contradict the rule.
    """
    dim, total, holders = rule.dim, sum(rule.blocks), rule.holders
    if dim is None:
        fits = [_fit(shape, {}) for shape in shapes[:1]] * len(shapes)
    elif any(len(shape) <= dim or shape[dim] % total for shape in shapes) or len(shapes) % holders:
        raise _refuse_misfit(rule, shapes)
    else:
        first = shapes[::holders]
        widths = [[shape[dim] // total * block for shape in first] for block in rule.blocks]
        fits = [fit for fit in fit_blocks(first, dim, widths) for _ in range(holders)]
    if [fit.local for fit in fits] != list(shapes):
        raise _refuse_misfit(rule, shapes)
    return fits


def fit_blocks(shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> list[Fit]:
    """Return where each rank's shard belongs, made of a piece of each of several blocks.

    The blocks follow one another along ``dim``; ``widths`` are the sizes along it by block and
    rank. Raises Undetermined if shards of these shapes are not made so.
    """
    cross_sections = {without_dim(shape, dim) for shape in shapes}
    sums = [sum(block[rank] for block in widths) for rank in range(len(shapes))]
    if len(cross_sections) != 1 or sums != [sum(shape[dim : dim + 1]) for shape in shapes]:
        raise _refuse_misfit(TpRule(dim, (1,) * len(widths)), shapes)
    placed = [(block, [0, *accumulate(block)]) for block in widths]
    return [
        _fit(shape, {dim: [(sizes[rank], ends[rank], ends[-1]) for sizes, ends in placed]})
        for rank, shape in enumerate(shapes)
    ]


def _refuse_misfit(rule: TpRule, shapes: Sequence[Shape]) -> Undetermined:
    return Undetermined(f"{rule} does not fit shards of {list_shapes(shapes)}")


def list_shapes(shapes: Sequence[Shape]) -> str:
    """Return the shapes of all ranks in order; consecutive equal ones once."""
    runs = [(list(shape), len(list(group))) for shape, group in groupby(shapes)]
    return ", ".join(
        f"{shape} on {count} ranks" if count > 1 else f"{shape}" for shape, count in runs
    )


def merge_shards(
    name: str, path: Path, shards: Sequence[TensorEntry], fits: Sequence[Fit]
) -> TensorEntry:
    """Return the tensor that ranks' shards form, each placed by its fit.

    A shard is a tensor by itself: its chunks are in its own coordinates. Raises Damaged if ranks
    have different dtypes or shapes for it.
    """
    shapes, dtypes = {fit.whole for fit in fits}, {shard.dtype for shard in shards}
    if len(shapes) != 1 or len(dtypes) != 1:
        listed = " and ".join(sorted(str(list(shape)) for shape in shapes))
        kinds = " and ".join(sorted(map(str, dtypes)))
        message = f"{name}: ranks hold it in the shape {listed}, as {kinds}"
        raise Damaged(message, "ranks-disagree", tensor=name)
    chunks = [
        placed
        for shard, fit in zip(shards, fits, strict=True)
        for chunk in shard.chunks
        for placed in fit.place(chunk)
    ]
    return TensorEntry(name, path, dtypes.pop(), shapes.pop(), merge_copies(chunks))


RankShards = Mapping[int, TensorEntry]
"""The shards of one tensor by rank."""


def merge_ranks(
    name: str, path: Path, parts: RankShards, rule: TpRule, *, world: int
) -> TensorEntry:
    """Return the tensor that the shards of all ranks form by a rule.

    Raises Damaged if a rank has none, or they differ in more than the size along the rule's dim;
    Raises Undetermined if they contradict the rule.
    """
    missing = sorted(set(range(world)) - set(parts))
    if missing:
        message = f"{name}: rank {missing[0]} has none, rank {min(parts)} has one"
        raise Damaged(message, "rank-missing", tensor=name)
    ordered = [parts[rank] for rank in range(world)]
    first, dim = ordered[0], rule.dim
    for rank, part in enumerate(ordered):
        shapes = [p.shape if dim is None else without_dim(p.shape, dim) for p in (part, first)]
        if part.dtype != first.dtype or shapes[0] != shapes[1]:
            message = f"{name}: rank 0 holds {first.dtype} {list(first.shape)},"
            message += f" rank {rank} {part.dtype} {list(part.shape)}"
            message += "" if dim is None else f"; sharded along dim {dim}, only that may differ"
            raise Damaged(message, "ranks-disagree", tensor=name)
    entry = merge_shards(name, path, ordered, fit_ranks([part.shape for part in ordered], rule))
    placement = Replicate() if dim is None else Shard(dim)
    placements = (placement,) if len(rule.blocks) == 1 else None
    return replace(entry, placements=placements, mesh=tp_mesh(world))


def tp_mesh(world: int) -> Mesh:
    """Return the mesh of ``world`` tensor-parallel ranks."""
    return Mesh.of((world,), ("tp",))
