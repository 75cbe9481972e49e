"""Megatron's parameters: as each model-parallel rank holds them, and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Place, TensorEntry, merge_copies
from ckptool.core.dtype import DType
from ckptool.core.sharding.tensor_parallel import (
    REPLICATED,
    Cut,
    Fit,
    NamedRule,
    TpRule,
    fit,
    how_to_say,
    named_rule,
)
from ckptool.core.views import narrowed, pieces_of_run
from ckptool.errors import Problem
from ckptool.formats.megatron.arguments import Arguments
from ckptool.formats.megatron.names import is_expert
from ckptool.formats.megatron.tensor_parallel import rule_of

Rank = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel rank."""


@dataclass(frozen=True, slots=True)
class Stored:
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
class Held:
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
class Whole:
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

    def fit_of(self, held: Held) -> Fit | str:
        """Where a rank's parameter belongs in the whole one, or in words why nobody knows."""
        rule = self._rule(held) if held.local else REPLICATED
        if isinstance(rule, str):
            return rule
        try:
            return fit(held.local, [*self._expert_cut(held), *self._tensor_cut(held, rule)])
        except ValueError as error:
            return str(error)

    def _rule(self, held: Held) -> TpRule | str:
        named = named_rule(self.rules, held.name)
        if named is not None:
            return named
        if self._tensor_parallel(held)[1] == 1 or not self.shapes[held.name]:
            return REPLICATED
        return rule_of(held.name, self.shapes, self.stated.get(held.name), self.args)

    def _tensor_parallel(self, held: Held) -> tuple[int, int]:
        """Tensor-parallel rank and degree: experts may have a degree of their own."""
        degree = self.degrees[0]
        own = self.args.integer("expert_tensor_parallel_size")
        if is_expert(held.name) and own is not None and degree % own == 0:
            degree = own
        return held.rank[0] % degree, degree

    def _tensor_cut(self, held: Held, rule: TpRule) -> list[Cut]:
        index, degree = self._tensor_parallel(held)
        return [] if rule.dim is None else [Cut(rule.dim, index, degree, rule.blocks)]

    def _expert_cut(self, held: Held) -> list[Cut]:
        return [Cut(0, held.rank[2], self.degrees[2])] if held.stacked else []


Found = dict[tuple[str, ...], list[tuple[Held, Sequence[Stored]]]]
"""By kind (``model``, ``fp32``, ``exp_avg``, ...) and name: what ranks store of a parameter."""


def put_together(fit_of: Callable[[Held], Fit | str], found: Found) -> Whole:
    """The tensors ``kind.name`` of what each rank stores of them, placed by ``fit_of``."""
    whole = Whole()
    for path, parts in found.items():
        full = ".".join(path)
        entry = _entry(full, path, fit_of, parts)
        if isinstance(entry, str):
            code = entry.code if isinstance(entry, Problem) else "ranks-disagree"
            whole.conflicts[full] = Problem(f"{full}: {entry}", code, tensor=full)
        else:
            whole.tensors[full] = entry
    return whole


def _entry(
    name: str,
    path: tuple[str, ...],
    fit_of: Callable[[Held], Fit | str],
    parts: list[tuple[Held, Sequence[Stored]]],
) -> TensorEntry | str:
    chunks: list[Chunk] = []
    shapes, dtypes = set(), set()
    for held, runs in parts:
        where = fit_of(held)
        if isinstance(where, str):
            return _unknown(held, where)
        shapes.add(where.whole)
        dtypes |= {stored.dtype for stored in runs}
        chunks += _chunks(where, runs, held.writer)
    if not dtypes:
        return "none of its elements is stored"
    if len(shapes) > 1 or len(dtypes) > 1:
        return f"ranks hold it in {_listed(shapes)}, as {_listed(dtypes)}"
    return TensorEntry(name, path, dtypes.pop(), shapes.pop(), merge_copies(chunks))


def _unknown(held: Held, reason: str) -> Problem:
    return Problem(
        f"how the {list(held.local)} of each tensor-parallel rank fit together is not known:"
        f" {reason}; {how_to_say(held.name)}",
        "ranks-unplaced",
    )


def _listed(values: Iterable[object]) -> str:
    return " and ".join(sorted(str(list(v) if isinstance(v, tuple) else v) for v in values))


def _chunks(where: Fit, runs: Sequence[Stored], writer: int) -> Iterator[Chunk]:
    for run in runs:
        itemsize = run.dtype.itemsize
        rank = writer if run.rank is None else run.rank
        for box, at in pieces_of_run(run.at, run.shape, run.start, run.stop, where.local, itemsize):
            for here, there in where.pieces:
                common = here.intersect(box)
                if common is not None:
                    place = narrowed(at, box.shape, common.relative_to(box.lo), itemsize)
                    lo = [
                        index - first + origin
                        for index, first, origin in zip(common.lo, here.lo, there.lo, strict=True)
                    ]
                    yield Chunk(Box.at(lo, common.shape), place, rank)


def runs_between(runs: Sequence[Stored], start: int, stop: int) -> list[Stored]:
    """The parts of consecutive 1-d runs that hold elements ``start`` to ``stop``, counted anew."""
    found = []
    for run in runs:
        lo, hi = max(start, run.start), min(stop, run.stop)
        if lo < hi:
            box = Box((lo - run.start,), (hi - run.start,))
            at = narrowed(run.at, run.shape, box, run.dtype.itemsize)
            found.append(Stored(box.shape, run.dtype, at, lo - start, run.rank))
    return found
