"""What a pickle names and would call, as inert records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


TORCH_SIZE = Global("torch", "Size")


class Call:
    """What a pickle would have made by calling ``function`` with ``args``, left undone.

    ``state`` is what BUILD would have set, ``items`` and ``entries`` what would have been appended
    to or stored into the result.
    """

    __slots__ = ("_added", "_fields", "args", "function", "is_new", "state")

    def __init__(
        self, function: Any, args: tuple[Any, ...], is_new: bool = False, state: Any = None
    ) -> None:
        self.function = function
        self.args = args
        self.is_new = is_new
        self.state = state
        self._added: tuple[list[Any], list[tuple[Any, Any]]] | None = None
        self._fields: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def name(self) -> str:
        """The dotted name of what would have been called."""
        return str(self.function) if isinstance(self.function, Global) else "(computed)"

    @property
    def is_filled(self) -> bool:
        """Whether anything may have been appended to the result, or stored into it."""
        return self._added is not None

    @property
    def items(self) -> list[Any]:
        """What would have been appended; few calls have any."""
        return self._both[0]

    @property
    def entries(self) -> list[tuple[Any, Any]]:
        """What would have been stored into the result."""
        return self._both[1]

    @property
    def _both(self) -> tuple[list[Any], list[tuple[Any, Any]]]:
        if self._added is None:
            self._added = [], []
        return self._added

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes BUILD would have set, of plain and of slotted classes."""
        if type(self.state) is dict:
            return self.state
        if self._fields is None:
            states = self.state if isinstance(self.state, tuple) else (self.state,)
            dicts = [state for state in states if isinstance(state, dict)]
            self._fields = (
                dicts[0] if len(dicts) == 1 else {k: v for d in dicts for k, v in d.items()}
            )
        return self._fields


class Persistent:
    """A persistent id: how torch.save refers to a storage."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class OrderedMapping(dict[Any, Any]):
    """A ``collections.OrderedDict``, with the attributes a pickle hung on it."""

    __slots__ = ("state",)
    state: Any
