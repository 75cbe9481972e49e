"""Megatron's parameters: as each model-parallel rank holds them, and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Place, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.sharding.tensor_parallel import (
    REPLICATED,
    Fit,
    NamedRule,
    RankCut,
    RankShard,
    TpRule,
    fit_rank,
    merge_shards,
    named_rule,
    unmerged,
)
from ckptool.core.views import narrowed, pieces_of_run
from ckptool.errors import Damaged, Problem, Undetermined
from ckptool.formats.megatron.arguments import Arguments
from ckptool.formats.megatron.names import is_expert
from ckptool.formats.megatron.tensor_parallel import find_rule

Rank = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel rank."""


@dataclass(frozen=True, slots=True)
class StorageRun:
    """A tensor, or a run of elements, that lies ``at`` a place; ``start`` is its first element.

    ``rank`` is the rank that wrote it, where that is another than the one that holds the parameter.
    """

    shape: tuple[int, ...]
    dtype: DType
    at: Place
    start: int = 0
    rank: int | None = None

    @property
    def stop(self) -> int:
        return self.start + Box.whole(self.shape).volume


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as one rank holds it.

    ``name`` is its name in the whole model and ``local`` the shape it has on the rank. ``writer``
    numbers the rank's files. ``view`` is the storage that it shares with others, and the element at
    which it begins there. ``stacked`` says that its first dim counts the rank's experts.
    """

    name: str
    rank: Rank
    writer: int
    local: tuple[int, ...]
    dtype: DType
    view: tuple[str, int] | None = None
    stacked: bool = False

    @property
    def numel(self) -> int:
        return Box.whole(self.local).volume


@dataclass(slots=True)
class MergeResult:
    """The tensors that were put together, and why others cannot be."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Model:
    """What says how the ranks' parameters fit together.

    ``degrees`` are those of tensor, pipeline and expert parallelism; ``rules`` are the user's,
    ``stated`` those that parameters were saved with, ``shapes`` what a rank holds of each.
    """

    args: Arguments
    degrees: Rank
    rules: Sequence[NamedRule]
    stated: dict[str, TpRule] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def fit(self, held: LocalParameter) -> Fit:
        """Return where a rank's parameter belongs in the whole one; Undetermined if unknown."""
        rule = self._rule(held) if held.local else REPLICATED
        return fit_rank(held.local, [*self._expert_cut(held), *self._tensor_cut(held, rule)])

    def _rule(self, held: LocalParameter) -> TpRule:
        named = named_rule(self.rules, held.name)
        if named is not None:
            return named
        if self._tensor_parallel(held)[1] == 1 or not self.shapes[held.name]:
            return REPLICATED
        return find_rule(held.name, self.shapes, self.stated.get(held.name), self.args)

    def _tensor_parallel(self, held: LocalParameter) -> tuple[int, int]:
        """Tensor-parallel rank and degree: experts may have a degree of their own."""
        degree = self.degrees[0]
        own = self.args.integer("expert_tensor_parallel_size")
        if is_expert(held.name) and own is not None and degree % own == 0:
            degree = own
        return held.rank[0] % degree, degree

    def _tensor_cut(self, held: LocalParameter, rule: TpRule) -> list[RankCut]:
        index, degree = self._tensor_parallel(held)
        return [] if rule.dim is None else [RankCut(rule.dim, index, degree, rule.blocks)]

    def _expert_cut(self, held: LocalParameter) -> list[RankCut]:
        return [RankCut(0, held.rank[2], self.degrees[2])] if held.stacked else []


Fragments = dict[tuple[str, ...], list[tuple[LocalParameter, Sequence[StorageRun]]]]
"""By kind (``model``, ``fp32``, ``exp_avg``, ...) and name: what ranks store of a parameter."""


def merge_fragments(fit: Callable[[LocalParameter], Fit], found: Fragments) -> MergeResult:
    """Return the tensors ``kind.name`` of what each rank stores of them, placed by ``fit``."""
    whole = MergeResult()
    for path, parts in found.items():
        name = ".".join(path)
        try:
            fits = [fit(held) for held, _ in parts]
        except Undetermined as error:
            shapes, parameter = [held.local for held, _ in parts], parts[0][0].name
            whole.conflicts[name] = unmerged(name, parameter, shapes, error, "sharding-unrecorded")
            continue
        dtypes = {stored.dtype for _, runs in parts for stored in runs}
        if len(dtypes) != 1:
            why = f"ranks hold it as {' and '.join(sorted(map(str, dtypes)))}"
            why = why if dtypes else "none of its elements is stored"
            whole.conflicts[name] = Problem(f"{name}: {why}", "ranks-disagree", tensor=name)
            continue
        dtype = dtypes.pop()
        shards = [RankShard(dtype, held.local, list(_chunks(held, runs))) for held, runs in parts]
        try:
            whole.tensors[name] = merge_shards(name, path, shards, fits)
        except Damaged as error:
            whole.conflicts[name] = error.message
    return whole


def _chunks(held: LocalParameter, runs: Sequence[StorageRun]) -> Iterator[Chunk]:
    """Yield what a rank stores of its parameter, in the coordinates that it has on the rank."""
    for run in runs:
        rank = held.writer if run.rank is None else run.rank
        size = run.dtype.itemsize
        for box, at in pieces_of_run(run.at, run.shape, run.start, run.stop, held.local, size):
            yield Chunk(box, at, rank)


def runs_between(runs: Sequence[StorageRun], start: int, stop: int) -> list[StorageRun]:
    """The parts of consecutive 1-d runs that hold elements ``start`` to ``stop``, counted anew."""
    found = []
    for run in runs:
        lo, hi = max(start, run.start), min(stop, run.stop)
        if lo < hi:
            box = Box((lo - run.start,), (hi - run.start,))
            at = narrowed(run.at, run.shape, box, run.dtype.itemsize)
            found.append(StorageRun(box.shape, run.dtype, at, lo - start, run.rank))
    return found
