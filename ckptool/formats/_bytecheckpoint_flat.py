"""The flat parameters of FSDP's decomposed form, as ByteCheckpoint saves them.

What each is made of is in ``.metadata``; it is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.errors import Damaged, Problem
from ckptool.formats._flat_params import FLAT, Member, taken_apart
from ckptool.formats._infer import with_inferred_mesh
from ckptool.formats._storage import natural, sizes


def flat_members(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Member]]:
    """What each flat parameter is made of, by its name; empty where there are none."""
    found: dict[str, list[Member]] = {}
    for name, each in fields.items():
        told = each.get("user_defined_dict") or {}
        try:
            found |= {
                flat: list(_members(flat, names, told))
                for flat, names in (told.get("fsdp_flat_param_to_fqns") or {}).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise Damaged(
                Problem(f"{name}: what flat parameters are made of is unclear", "parameters-flat")
            ) from None
    return found


def _members(flat: str, names: list[str], told: Mapping[str, Any]) -> Iterator[Member]:
    """The parameters of one flat parameter; names are relative to its unit, or whole."""
    head = flat.removesuffix(FLAT)
    whole = all(name.startswith(head) for name in names)
    left = list(zip(names, told["fsdp_shapes"][flat], strict=True))
    start = 0
    lengths = told["fsdp_numels_with_padding"][flat]
    for length, padding in zip(lengths, told["fsdp_is_padding_mask"][flat], strict=True):
        if not padding:
            name, shape = left.pop(0)
            name = (name if whole else head + name.lstrip(".")).lstrip(".")
            yield Member((name,), sizes(shape), start)
        start += natural(length)
    if left:
        raise IndexError


def apart(catalog: Catalog, flat: Mapping[str, list[Member]]) -> Catalog:
    """The catalog of one family with its flat parameters, and states of them, taken apart."""
    found = {name: _whose(entry, flat) for name, entry in catalog.tensors.items()}
    if not any(found.values()):
        return catalog
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        members = found[name]
        parts = taken_apart(entry, members) if members else [entry]
        tensors |= {part.name: part for part in parts}
    return with_inferred_mesh(replace(catalog, tensors=tensors, mesh=None))


def _whose(entry: TensorEntry, flat: Mapping[str, list[Member]]) -> list[Member]:
    """The members of a flat parameter, or of an optimizer's state for one; none of others."""
    if not entry.path:
        return []
    *head, last = map(str, entry.path)
    name, found, state = last.partition(FLAT)
    members = flat.get(name + found, []) if len(entry.shape) == 1 else []
    return [
        replace(member, path=(*head, f"{member.path[0]}{state}")) for member in members if found
    ]
