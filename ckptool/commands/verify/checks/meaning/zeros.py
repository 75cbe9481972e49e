"""Weights that are all zero while those of other layers are not, as after a shard that got lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckptool.core.catalog import TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.state_category import state_category
from ckptool.engine.check.spans import ByteSpan
from ckptool.errors import Problem

_LEAST = 1 << 20
"""Bytes of a tensor that is looked at: small ones are read together with others."""
_FROM_ZERO = "lora"
"""Of names of weights that begin as zeros, and stay so in an expert that is never chosen."""


def zero_weights(
    tensors: Mapping[str, TensorEntry], zeros: Mapping[str, int], spans: Iterable[ByteSpan]
) -> Iterator[Problem]:
    """Yield the model's matrices that are all zero, as few of those are that differ by numbers.

    ``zeros`` counts the bytes of each tensor that were found to be zero, among those of ``spans``.
    """
    candidates = {n for n in zeros if n in tensors and _is_weight(tensors[n])}
    if not candidates:
        return
    read: Counter[str] = Counter()
    for span in spans:
        for view in span.views:
            if view.tensor in candidates:
                read[view.tensor] += view.nbytes
    empty = {name for name in candidates if tensors[name].nbytes <= read[name] == zeros[name]}
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, entry in tensors.items() if empty else ():
        if _is_weight(entry):
            kinds[abstract(name)[0]].append(name)
    for kind, names in kinds.items():
        found = [name for name in names if name in empty]
        others = len(names) - len(found)
        if kind and found and others >= 2 and others > len(found):
            yield from (_problem(name, others, kind) for name in found)


def _is_weight(entry: TensorEntry) -> bool:
    is_matrix = len(entry.shape) > 1 and entry.nbytes >= _LEAST and entry.dtype.kind == "float"
    return is_matrix and _FROM_ZERO not in entry.name.lower() and state_category(entry) == "model"


def _problem(name: str, others: int, kind: str) -> Problem:
    message = f"{name}: all values are zero, but of none of {others:,} others like {kind}"
    return Problem(message, "weight-zero", tensor=name)
