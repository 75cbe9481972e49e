"""Inert records of what a pickle names and would call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, Union

from msgspec import Struct

from ckptool.errors import Damaged


class Global(Struct, frozen=True):
    """A class or function that a pickle names. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


TORCH_SIZE = Global("torch", "Size")


class Names(dict[Global, int]):
    """The globals of a pickle, with the offset of the opcode that first names each.

    ``records`` are classes of which the pickle only makes instances, without arguments that name
    code, and sets their fields: neither a function nor an ``__init__`` of theirs is called.
    """

    def __init__(self, at: Mapping[Global, int] = {}, records: Iterable[Global] = ()) -> None:
        super().__init__(at)
        self.records = frozenset(records)


class Call:
    """The call of ``function`` with ``args`` that a pickle would have made.

    ``state`` is what BUILD would have set, ``items`` and ``entries`` what would have been appended
    to or stored into the result.
    """

    __slots__ = ("_added", "_fields", "_name", "args", "function", "is_new", "state")

    def __init__(
        self, function: Any, args: tuple[Any, ...], is_new: bool = False, state: Any = None
    ) -> None:
        self.function = function
        self.args = args
        self.is_new = is_new
        self.state = state
        self._added: tuple[list[Any], list[tuple[Any, Any]]] | None = None
        self._fields: dict[str, Any] | None = None
        self._name = ""

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        """Return the dotted name of the function, which is asked for a dozen times a tensor."""
        if not self._name:
            self._name = str(self.function) if isinstance(self.function, Global) else "(computed)"
        return self._name

    @property
    def is_filled(self) -> bool:
        """Return whether anything would have been appended to the result, or stored into it."""
        return self._added is not None and any(self._added)

    @property
    def items(self) -> list[Any]:
        """Return what would have been appended; few calls have any."""
        return self._both[0]

    @property
    def entries(self) -> list[tuple[Any, Any]]:
        """Return what would have been stored into the result."""
        return self._both[1]

    @property
    def _both(self) -> tuple[list[Any], list[tuple[Any, Any]]]:
        if self._added is None:
            self._added = [], []
        return self._added

    @property
    def fields(self) -> dict[str, Any]:
        """Return the attributes BUILD would have set."""
        if type(self.state) is dict:
            return self.state
        if self._fields is None:
            self._fields = state_fields(self.state)
        return self._fields


def state_fields(state: Any) -> dict[str, Any]:
    """Return the attributes that a state sets: a dict, or of slotted classes a tuple with two."""
    states = state if isinstance(state, tuple) else (state,)
    dicts = [part for part in states if isinstance(part, dict)]
    return dicts[0] if len(dicts) == 1 else {k: v for part in dicts for k, v in part.items()}


class Persistent:
    """A persistent id: how torch.save refers to a storage."""

    __slots__ = ("value",)

    def __init__(self, value: PickleValue) -> None:
        self.value = value


class OrderedMapping(dict[Any, Any]):
    """A ``collections.OrderedDict``, with the attributes a pickle hung on it."""

    __slots__ = ("state",)
    state: Any


_Scalar: TypeAlias = bool | int | float | complex | str | bytes | bytearray | None
MOST_SINGLE = 1 << 29
"""Bytes of a pickle, outside its rows, that are followed opcode by opcode."""
_MOST_OF_ROWS = MOST_SINGLE >> 6


class RowObjects(list[Any]):
    """The objects that rows of a pickle refer to; limits how many are made, whatever the size."""

    def __init__(self) -> None:
        super().__init__()
        self._budget = _MOST_OF_ROWS

    def count_one(self) -> None:
        """Count a text, or a row of which an object is made; Damaged if they are too many."""
        self._budget -= 1
        if self._budget < 0:
            raise Damaged(f"more than {_MOST_OF_ROWS:,} objects made of a pickle's rows")


PickleValue: TypeAlias = Union[
    _Scalar,
    Global,
    Call,
    Persistent,
    "list[PickleValue]",
    "tuple[PickleValue, ...]",
    "dict[PickleValue, PickleValue]",
    "set[PickleValue]",
    "frozenset[PickleValue]",
]
"""The value of a pickle: plain values and containers, and inert records."""


def new_object(cls: Global, **attributes: Any) -> Call:
    """Return an object of a class, created without its ``__init__``."""
    return Call(cls, (), True, attributes)
