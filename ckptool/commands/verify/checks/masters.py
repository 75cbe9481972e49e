"""Weights of 16 bits beside their masters of 32 bits: each should be its master, rounded.

An optimizer steps the masters, and the weights are rounded from them. A resume takes the masters,
an export the weights: where they differ, the two are different models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.state_category import is_master
from ckptool.core.text import list_some
from ckptool.engine.check.content import ContentReport
from ckptool.errors import Problem
from ckptool.storage.files import Files

_PREFIXES = ("", "model.", "module.")
"""What may come before the name of a parameter that its master has: those of Megatron's
torch_dist have nothing, DeepSpeed's ``module``."""
_IN_STATE = re.compile(
    r"(?:.+\.)?state\.(?:(?:fp32_param|param)\.(?P<of_kind>.+)|(?P<own>.+)\.master_param)"
)
"""The name of a master in an optimizer's state: by kind (Megatron-core's torch_dist), or by
parameter (Megatron-FSDP, Transformer Engine's FusedAdam)."""
_FEW = 2


class Mastered(NamedTuple):
    """The names of a weight and of its master."""

    weight: str
    master: str


def mastered_weights(catalog: Catalog) -> list[Mastered]:
    """Return the weights that have masters of their shape; int16 remainders are no masters."""
    tensors, found = catalog.tensors, []
    for name, master in tensors.items():
        parameter = _parameter_of(name)
        if parameter is None or master.dtype.name != "float32" or not master.elements:
            continue
        named = (tensors.get(prefix + parameter) for prefix in _PREFIXES)
        weights = (each for each in named if each and each.shape == master.shape)
        found += [Mastered(each.name, name) for each in weights if _is_weight(each)]
    return found


def _parameter_of(name: str) -> str | None:
    """Return the name of the parameter that a name is the master of; None if it is no master's."""
    if is_master(name):
        return name.partition(".")[2]
    found = _IN_STATE.fullmatch(name) if "state." in name else None
    return found["of_kind"] or found["own"] if found else None


def _is_weight(entry: TensorEntry) -> bool:
    return entry.stored is None and entry.dtype.name in ("float32", "float16", "bfloat16")


def rounded_types(catalog: Catalog, pairs: Collection[Mastered]) -> dict[str, DType]:
    """Return the type of the weight for both of each pair."""
    types = {pair: catalog.tensors[pair.weight].dtype for pair in pairs}
    return {name: dtype for pair, dtype in types.items() for name in pair}


def master_problems(
    pairs: Collection[Mastered],
    located: Mapping[str, TensorEntry],
    read: ContentReport,
    source: Files,
    damaged: Collection[str],
) -> Iterator[Problem]:
    """Yield the weights that are not their masters rounded.

    Pairs whose fingerprints differ, or were not taken of all elements, are read once more. What is
    in ``damaged`` files has problems of its own, and so have values that are not finite.
    """
    odd = [
        pair
        for pair in pairs
        if all(name in located for name in pair)
        and not _are_equal(pair, located, read)
        and not any(c.at.file in damaged for name in pair for c in located[name].chunks)
    ]
    if not odd:
        return
    from ckptool.commands.verify.checks.master_bits import differences, other_way

    found = differences([(located[pair.weight], located[pair.master]) for pair in odd], source)
    way, explained = other_way(found)
    for each in found:
        if each not in explained:
            name = each.weight.name
            yield Problem(each.message, "weights-differ-from-masters", tensor=name)
    if way is not None:
        names = [each.weight.name for each in explained]
        message = f"{list_some(names, _FEW)}: rounded {way} from masters, as the values show"
        yield Problem(message, "weights-rounded-otherwise", tensor=names[0])


def _are_equal(pair: Mastered, located: Mapping[str, TensorEntry], read: ContentReport) -> bool:
    weight, master = (read.prints.get(name) for name in pair)
    if weight is None or master is None:
        return False
    elements = located[pair.weight].elements
    return weight == master and weight.elements == elements
