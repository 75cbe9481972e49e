"""Attributes, names and numbers of the records that torch pickles for sharded tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckptool.errors import UNREAD, Damaged, Unsupported
from ckptool.serialization.archive.tensors import describe, read_natural
from ckptool.serialization.pickle.records import Call, PickleValue

MOST_RANKS = 1 << 18
"""Ranks that a device mesh has at most."""


def require_known(fields: Mapping[str, Any], names: Collection[str], what: str) -> None:
    """Raise Unsupported for a field of a record that is not known."""
    extras = [name for name in fields if name not in names]
    if extras:
        raise Unsupported(f"{what} with {describe(extras[0])}, which is not known", UNREAD)


def read_flat_ints(value: PickleValue) -> tuple[int, ...]:
    """Return the ints of a nested tuple, in order; Damaged if there are too many."""
    ints: list[int] = []
    stack = [value]
    room = MOST_RANKS
    while stack:
        item = stack.pop()
        room -= 1
        if isinstance(item, tuple | list):
            room -= len(item)
            stack += reversed(item)
        else:
            ints.append(read_natural(item))
        if room < 0:
            raise Damaged(f"a mesh of more than {MOST_RANKS:,} ranks")
    return tuple(ints)


def read_name(value: PickleValue) -> str:
    """Return a name of a pickle; Damaged if it is something else."""
    if not isinstance(value, str):
        raise Damaged(f"expected a name, got {describe(value)}")
    return value


def read_fields(
    value: PickleValue, expected: str, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the attributes of a record; Damaged if it is none.

    Raises Unsupported for one that is not among these ``names``, if there are any.
    """
    if not isinstance(value, Call):
        raise Damaged(f"expected a {expected} record, got {type(value).__name__}")
    if names is not None:
        require_known(value.fields, names, f"a {expected} record")
    return value.fields
