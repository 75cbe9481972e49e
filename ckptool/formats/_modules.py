"""Pickled torch modules as inert records: what their ``state_dict()`` would hold.

A module is an object whose attributes are kept as they are in memory (torch 1.0 to 2.15):
``_parameters``, ``_buffers`` and ``_modules``, each a dict by name, and the set of the names of
buffers that are not saved. What a class of its own adds by code cannot be known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.formats._pickle import Call


class Module(NamedTuple):
    """What a module holds itself, by name, and the modules in it."""

    tensors: list[tuple[str, Any]]
    children: list[tuple[str, Any]]


def module_state(value: Any) -> Module | None:
    """Return what a module's record holds, in the order of ``state_dict()``; None for all else."""
    if not isinstance(value, Call) or value.state is None:
        return None
    fields = value.fields
    parts = [fields.get(name) for name in ("_parameters", "_buffers", "_modules")]
    parameters, buffers, modules = (one if isinstance(one, dict) else None for one in parts)
    if parameters is None or buffers is None or modules is None:
        return None
    passing = _names(fields.get("_non_persistent_buffers_set"))
    kept = {name: buffer for name, buffer in buffers.items() if name not in passing}
    tensors = [*parameters.items(), *kept.items()]
    return Module(
        [(str(name), tensor) for name, tensor in tensors if tensor is not None],
        [(str(name), child) for name, child in modules.items() if child is not None],
    )


def _names(value: Any) -> set[str]:
    """Return the members of a set of names, as protocol 2 writes it or later ones."""
    if isinstance(value, Call) and len(value.args) == 1:
        value = value.args[0]
    names = value if isinstance(value, list | tuple | set | frozenset) else ()
    return {name for name in names if isinstance(name, str)}
