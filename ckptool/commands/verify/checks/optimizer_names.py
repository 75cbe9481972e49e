"""The optimizer and the parameter that state is of, by its name, and the parameters of groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptool.core.catalog import Catalog

_STATE, _GROUPS, _OPTIMIZER = ".state.", ".param_groups.", "optim"
_NUMBERED = re.compile(r"\d+\.[^.]+")
_PARAMS = re.compile(r"(?s)(.+)\.params(?:@rank\d+)?")
RATE = re.compile(r"(?:.+\.)?param_groups\..+\.lr")
"""The name of a group's learning rate."""
MOMENTS = frozenset(["exp_avg", "exp_avg_sq"])
MOMENTUM = "momentum_buffer"
"""The mean of gradients of SGD and Muon, which count no steps."""
_KINDS = MOMENTS | {"max_exp_avg_sq", MOMENTUM, "square_avg", "exp_inf"}
STEP = "step"


class StateName(NamedTuple):
    """The parts of a state's name: which optimizer's it is, of which parameter, and its kind.

    The kind comes first if state is named ``by_kind`` (DeepSpeed, Megatron), else last (torch). In
    either order, it may be inside an optimizer's ``state`` (``is_inside``) or not.
    """

    optimizer: str
    parameter: str
    kind: str
    by_kind: bool
    is_inside: bool

    @classmethod
    def of(cls, name: str) -> StateName:
        dotted, at = f".{name}", _state_in(f".{name}")
        is_state = at >= 0
        optimizer, rest = (dotted[1:at], dotted[at + len(_STATE) :]) if is_state else ("", name)
        first, _, tail = rest.partition(".")
        if tail and (first in _KINDS or (first == STEP and not is_state)):
            return cls(optimizer, tail, first, True, is_state)
        parameter, _, kind = rest.rpartition(".")
        return cls(optimizer, parameter, kind, False, is_state)

    @property
    def is_moment(self) -> bool:
        return self.kind in MOMENTS and bool(self.parameter)

    @property
    def counts_steps(self) -> bool:
        """Whether it counts the steps of a parameter; those of groups may begin at 1."""
        return self.kind == STEP and (self.by_kind or self.is_inside)


def _state_in(dotted: str) -> int:
    """Return where the state of an optimizer begins in a name; -1 if it names none.

    Composer's optimizers are inside another ``state``, and a module of a named parameter may be
    called so: the optimizer's is the first after what is called an optimizer.
    """
    last = dotted.rfind(_STATE)
    if last <= 0 or _NUMBERED.fullmatch(dotted, last + len(_STATE)):
        return last
    return dotted.find(_STATE, max(dotted.rfind(_OPTIMIZER, 0, last), 0))


def moments_in(names: Iterable[str]) -> Iterator[tuple[str, StateName]]:
    """Yield the names of moments, each with its parts."""
    for name in names:
        if "exp_avg" in name and (of := StateName.of(name)).is_moment:  # most are weights
            yield name, of


class Group(NamedTuple):
    """The parameters that have the options below ``head``, by their names or numbers."""

    optimizer: str
    head: str
    parameters: Sequence[object]

    def state_of(self, parameter: object) -> str:
        """Return the beginning of the names of a parameter's state."""
        return f"{self.optimizer}{_STATE}{parameter}".removeprefix(".")


def groups_of(catalog: Catalog) -> Iterator[Group]:
    """Yield the groups of all optimizers; those of several ranks may be the same."""
    for name, entry in catalog.objects.items():
        optimizer, _, rest = f".{name}".partition(_GROUPS)
        match = _PARAMS.fullmatch(rest)
        if match and isinstance(entry.value, list):
            head = f"{optimizer}{_GROUPS}{match[1]}".removeprefix(".")
            yield Group(optimizer.removeprefix("."), head, entry.value)


def flat_groups_of(catalog: Catalog) -> Iterator[Group]:
    """Yield a group of all parameters whose options have the parameter's name instead of a list.

    As torch flattens an optimizer's state dict; one that has a list has numbers.
    """
    parameters: dict[str, dict[str, None]] = {}
    for name in catalog.objects:
        optimizer, _, rest = f".{name}".partition(_GROUPS)
        parameter = rest.rpartition(".")[0]
        if parameter and not parameter.isdecimal():
            parameters.setdefault(optimizer.removeprefix("."), {})[parameter] = None
    for optimizer, names in parameters.items():
        head = f"{optimizer}{_GROUPS}{next(iter(names))}".removeprefix(".")
        yield Group(optimizer, head, [*names])
