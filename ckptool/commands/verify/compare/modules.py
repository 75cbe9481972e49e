"""The numbered modules of models, layers and experts, of which all tensors are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from ckptool.core.text import MOST_STEPS, list_some

_MOST = 4
_LONGEST = 10
"""Digits of a number of a module, at least, that none has: a hostile name has thousands."""


class Module(Struct, frozen=True):
    """A module of a list of them: layer 17 of ``model.layers``."""

    among: str
    number: int


def modules_of(name: str) -> Iterator[Module]:
    """Yield the numbered modules that a tensor is in, the outermost first."""
    steps = name.split(".")
    for at, step in enumerate(steps[:-1][:MOST_STEPS]):
        if step.isdecimal() and len(step) < _LONGEST:
            yield Module(".".join(steps[:at]), int(step))


def numbers_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the modules in each list of modules."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        for module in modules_of(name):
            numbers[module.among].add(module.number)
    return numbers


def lost_modules(
    names: Iterable[str], remaining: Mapping[str, set[int]], whole: Mapping[str, set[int]]
) -> dict[str, str]:
    """Return for each missing tensor which modules are missing as a whole, with counts, if any.

    ``remaining`` are the numbers of the modules that are there, ``whole`` those of all. Modules of
    which the same numbers are missing in many layers, such as experts, have one text.
    """
    outermost = {name: _outermost(name, remaining) for name in names}
    numbers: dict[str, set[int]] = defaultdict(set)
    for module in filter(None, outermost.values()):
        numbers[module.among].add(module.number)
    texts = {among: _text(among, numbers[among], whole[among]) for among in numbers}
    return {name: texts[module.among] for name, module in outermost.items() if module is not None}


def _outermost(name: str, remaining: Mapping[str, set[int]]) -> Module | None:
    modules = modules_of(name)
    return next((m for m in modules if m.number not in remaining.get(m.among, ())), None)


def _text(among: str, numbers: set[int], whole: set[int]) -> str:
    """Return text such as ``all of model.layers.17 (31 of 32 found)``."""
    shown = list_some([str(number) for number in sorted(numbers)], _MOST)
    steps = [*filter(None, [abstract(among)]), shown if len(numbers) == 1 else f"{{{shown}}}"]
    return f"all of {'.'.join(steps)} ({len(whole - numbers):,} of {len(whole):,} found)"


def abstract(among: str) -> str:
    """Return a list of modules with ``*`` for the numbers of those around it."""
    return ".".join("*" if step.isdecimal() else step for step in among.split("."))


def count_modules(names: Iterable[str]) -> str:
    """Return text such as ``32 in model.layers, 8 in model.layers.*.mlp.experts``."""
    counts: dict[str, int] = defaultdict(int)
    for among, numbers in numbers_of(names).items():
        counts[abstract(among)] = max(counts[abstract(among)], len(numbers))
    shown = [f"{count:,} in {among}" for among, count in counts.items() if among and count > 1]
    return list_some(shown, _MOST)
