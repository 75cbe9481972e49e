"""Whether an optimizer's state has the shape of its parameter, however the two are named.

Of parameters that have numbers alone, all shapes together tell whether they are the model's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

from msgspec import Struct

from ckptool.commands.verify.checks.optimizer_names import MOMENTS, StateName
from ckptool.commands.verify.checks.training import models_by_tail
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.quantization.master_names import keys_of
from ckptool.core.state_category import state_category
from ckptool.errors import Problem

_MEAN, _BUFFER = "exp_avg", "momentum_buffer"
_KINDS = MOMENTS | {"max_exp_avg_sq", _BUFFER}
_SQUARES = "exp_avg_sq"
_DIMS = 2
"""What is projected are matrices."""
_LEAST, _POOLED = 4, 6
"""States of a kind of layers, or of what is no layer's, that are all projected by no fault."""

Shape = tuple[int, ...]


class _Pair(Struct, frozen=True):
    """The state of a parameter, and the ``shape`` that it should have, as ``reference`` has it."""

    state: TensorEntry
    parameter: str
    reference: str
    shape: Shape
    mask: Shape | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether it is state of the elements that a mask beside it chooses (SaRA)."""
        shape = self.state.shape
        return self.mask == self.shape and len(shape) == 1 and shape[0] <= math.prod(self.shape)

    @property
    def is_shared(self) -> bool:
        """Whether it is one mean of squares for all of a parameter, or for each row (NovoGrad)."""
        shape = self.state.shape or (1,) * len(self.shape)
        sizes = zip(shape, self.shape, strict=False)
        are_one = len(shape) == len(self.shape) and all(size in (1, whole) for size, whole in sizes)
        return are_one and _SQUARES in self.state.name

    @property
    def rank(self) -> int | None:
        """The size of the one dim that is smaller than the matrix's, as that of a projection."""
        if len(self.state.shape) != len(self.shape):
            return None
        sizes = zip(self.state.shape, self.shape, strict=True)
        differing = [(size, whole) for size, whole in sizes if size != whole]
        size, whole = differing[0] if len(differing) == 1 else (0, 0)
        return size if size < whole and size <= min(self.shape) else None


def shape_problems(catalog: Catalog) -> Iterator[Problem]:
    """Yield state in another shape than its parameter's, unless an optimizer projects it."""
    states = [entry for entry in catalog.tensors.values() if _is_state(entry)]
    if not states:
        return
    pairs = list(_pairs(states, catalog))
    odd = [pair for pair in pairs if pair.state.shape != pair.shape]
    odd = [pair for pair in odd if not (pair.is_shared or pair.is_chosen)]
    ranks = _projection_ranks(pairs) if odd else set()
    for pair in (pair for pair in odd if pair.rank not in ranks):
        name = pair.state.name
        message = f"{name}: {list(pair.state.shape)}, but {pair.reference} is {list(pair.shape)}"
        yield Problem(message, "optimizer-shape", tensor=name)
    yield from _check_model(states, catalog)


def _check_model(states: Iterable[TensorEntry], catalog: Catalog) -> Iterator[Problem]:
    """Yield a problem if no state of numbered parameters has the shape of any of the model's.

    State of matrices alone may be projected, or of adapters that were merged into the model (LoRA),
    and a model of vectors alone may be buffers.
    """
    titles = ((StateName.of(entry.name), entry) for entry in states)
    numbered = [e for of, e in titles if of.kind in _KINDS and of.parameter.isdigit()]
    models = [entry for entry in catalog.tensors.values() if state_category(entry) == "model"]
    count = len({entry.name.rpartition(".")[0] for entry in numbered})
    if not all(map(_has_both, (numbered, models))) or 2 * len(models) < count:
        return  # the model's tensors are a small part of it
    if not {entry.shape for entry in numbered}.isdisjoint(entry.shape for entry in models):
        return
    first = numbered[0]
    message = f"{first.name}: {list(first.shape)}, and no state of {count:,} parameters has a shape"
    yield Problem(f"{message} that the model has", "optimizer-shape", tensor=first.name)


def _has_both(entries: Sequence[TensorEntry]) -> bool:
    """Return whether there are matrices and vectors among tensors."""
    dims = [len(entry.shape) for entry in entries if entry.elements > 1]
    return min(dims, default=_DIMS) < _DIMS <= max(dims, default=0)


def _pairs(states: Iterable[TensorEntry], catalog: Catalog) -> Iterator[_Pair]:
    """Yield the state of parameters whose shape is known.

    Where the kind comes first in names, a run of as many elements is that of a flat buffer. Else
    the parameter may be a number: then its first state says the shape.
    DeepSpeed's universal checkpoints had moments of one rank's experts beside masters of all
    (AutoEP).
    """
    models = models_by_tail(catalog.tensors)
    firsts: dict[str, TensorEntry] = {}
    shapes_of = cache(partial(_shapes_of, catalog))
    masks = {
        name.rpartition(".")[0]: entry.shape
        for name, entry in catalog.tensors.items()
        if entry.source_dtype.kind == "bool"
    }
    for entry in states:
        _, parameter, kind, by_kind, _ = StateName.of(entry.name)
        if kind in _KINDS and by_kind:
            shapes = shapes_of(parameter)
            fits = entry.shape in shapes.values() or entry.shape in map(_flat, shapes.values())
            if shapes:
                reference, shape = next(iter(shapes.items()))
                yield _Pair(entry, parameter, reference, entry.shape if fits else shape)
        elif kind in _KINDS and parameter:
            head = entry.name.removesuffix(f".{kind}")
            first = firsts.setdefault(head, entry)
            of = first if parameter.isdigit() else models.get(parameter, first)
            yield _Pair(entry, parameter, of.name, of.shape, masks.get(head))


def _is_state(entry: TensorEntry) -> bool:
    """Return whether a tensor may be state that has its parameter's shape."""
    is_named_so = _MEAN in entry.name or _BUFFER in entry.name
    return is_named_so and state_category(entry) == "optimizer"


def _shapes_of(catalog: Catalog, parameter: str) -> Mapping[str, Shape]:
    """Return the shapes that a parameter has, as a weight and as a master, by their names."""
    keys = [*keys_of(parameter), (f"fp32.{parameter}", ())]
    entries = ((catalog.tensors.get(key), len(index)) for key, index in keys)
    return {entry.name: entry.shape[depth:] for entry, depth in entries if entry}


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _projection_ranks(pairs: Sequence[_Pair]) -> set[int | None]:
    """Return the ranks that GaLore and APOLLO project gradients to: of a kind, all or none.

    Matrices outside layers are of one kind. No rank is larger than the smaller dim.
    """
    kinds: dict[str, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        if len(pair.shape) == _DIMS:
            kind, numbers = abstract(pair.parameter)
            kinds[kind if numbers else ""].append(pair)
    ranks = set[int | None]()
    for kind, group in kinds.items():
        kind_ranks = {pair.rank for pair in group}
        if len(kind_ranks) == 1 and len(group) >= (_LEAST if kind else _POOLED):
            ranks |= kind_ranks
    return ranks - {None}
