"""The values of an adapter's tensors, which are few enough to be read before they are merged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckptool.commands.merge.operands import Operand
from ckptool.commands.verify.checks.nonfinite import not_finite_problems
from ckptool.core.casts import can_cast
from ckptool.core.catalog import TensorEntry
from ckptool.core.text import list_some, plural
from ckptool.engine.check.digest import digests
from ckptool.engine.read.tensors import TensorSource

_FEW = 3


def digests_of(adapter: Operand, names: Collection[str]) -> dict[str, tuple[object, ...]]:
    """Return what only equal tensors of an adapter have in common: type, shape and digest."""
    source, located = adapter.opened.source, _locate(adapter, names)
    hexes = digests(located.values(), TensorSource(source), source.policy.workers)
    return {name: (entry.dtype, entry.shape, hexes[name]) for name, entry in located.items()}


def notes_on_values(adapter: Operand) -> Iterator[str]:
    """Yield a note if tensors of an adapter have NaN or infinite values."""
    tensors = adapter.rewritten.catalog.tensors
    located = _locate(adapter, {name for name, entry in tensors.items() if can_cast(entry)})
    problems = not_finite_problems(located, located, adapter.opened.source)
    if odd := [problem for problem in problems if problem.counts]:
        yield (
            f"{plural(len(odd), 'tensor')} of {adapter.label} with NaN or infinite values, and so"
            f" are the weights that they are merged into: {list_some(odd, _FEW)}"
        )


def _locate(adapter: Operand, names: Collection[str]) -> Mapping[str, TensorEntry]:
    """Return tensors of an adapter where its own files have them."""
    catalog = adapter.rewritten.catalog
    tensors = {name: entry for name, entry in catalog.tensors.items() if name in names}
    return adapter.opened.open_containers(catalog.with_tensors(tensors)).tensors
