"""Of which optimizer and parameter a state is by its name, and which parameters a group has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptool.core.catalog import Catalog

_STATE, _GROUPS = ".state.", ".param_groups."
_PARAMS = re.compile(r"(?s)(.+)\.params(?:@rank\d+)?")


class StateName(NamedTuple):
    """What precedes an optimizer's ``state``, as there may be several; its parameter and kind."""

    optimizer: str
    parameter: str
    kind: str

    @classmethod
    def of(cls, name: str) -> StateName:
        optimizer, is_state, rest = f".{name}".partition(_STATE)
        parameter, _, kind = (rest if is_state else name).rpartition(".")
        return cls(optimizer.lstrip(".") if is_state else "", parameter, kind)


class Group(NamedTuple):
    """The parameters that have the options below ``head``, by their names or numbers."""

    optimizer: str
    head: str
    parameters: Sequence[object]

    def state_of(self, parameter: object) -> str:
        """Return what the names of a parameter's state begin with."""
        return f"{self.optimizer}{_STATE}{parameter}".removeprefix(".")


def groups_of(catalog: Catalog) -> Iterator[Group]:
    """Yield the groups of all optimizers; those of several ranks may be the same."""
    for name, entry in catalog.objects.items():
        optimizer, _, rest = f".{name}".partition(_GROUPS)
        found = _PARAMS.fullmatch(rest)
        if found and isinstance(entry.value, list):
            head = f"{optimizer}{_GROUPS}{found[1]}".removeprefix(".")
            yield Group(optimizer.removeprefix("."), head, entry.value)
