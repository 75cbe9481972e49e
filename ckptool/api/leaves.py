"""The leaves of a state dict: their names, where they are, and how to put others there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptool.errors import UsageError


class Leaf(NamedTuple):
    """A value, and the container that holds it under a key or position."""

    container: Any
    key: Any
    value: Any

    @property
    def is_fixed(self) -> bool:
        """Whether no other value can be put there."""
        return isinstance(self.container, tuple)

    def replace(self, value: Any) -> None:
        """Put another value there."""
        self.container[self.key] = value


def leaves_of(state_dict: dict[str, Any]) -> dict[str, Leaf]:
    """Every leaf by the name that its entry of a catalog has: the steps to it, joined by dots.

    As DCP flattens (torch 2.4 to 2.13): dicts are entered, lists where a dict or a tensor lies
    inside; and as in catalogs, tuples where a tensor does. Raises TypeError for what is no dict and
    for a module or optimizer in it, UsageError where two leaves have one name.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"load() fills a dict, not {_kind(state_dict)}")
    found: dict[str, Leaf] = {}
    for name, leaf in _leaves("", state_dict):
        if name in found:
            raise UsageError(f"two values of the state dict are called {name!r}, joined by dots")
        if _has_state(leaf.value):
            raise TypeError(f"load() fills tensors, and {name} is {_kind(leaf.value)}")
        found[name] = leaf
    return found


def _leaves(head: str, container: Any) -> Iterator[tuple[str, Leaf]]:
    steps = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in steps:
        name = f"{head}{key}"
        if isinstance(value, Mapping) or _is_entered(value):
            yield from _leaves(f"{name}.", value)
        else:
            yield name, Leaf(container, key, value)


def _is_entered(value: Any) -> bool:
    """Whether a list holds a dict or a tensor, or a tuple a tensor, at any depth."""
    import torch

    if not isinstance(value, list | tuple):
        return False
    kinds = (torch.Tensor, Mapping) if isinstance(value, list) else torch.Tensor
    return any(isinstance(inner, kinds) or _is_entered(inner) for inner in value)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None))


def _kind(value: Any) -> str:
    """What a value is, and what to give in its place where it has a state dict."""
    return f"a {type(value).__name__}" + ("; give its state_dict()" if _has_state(value) else "")
