"""Read a pickle without running it.

A pickle is a program for a stack machine. This machine knows every opcode of protocols 0 to 5 and
builds plain containers; wherever the program names a class or function, it leaves an inert
``Global``, and wherever it would call one, an inert ``Call``. Nothing is imported, nothing is
called. Memory is bounded by the pickle's own size; a dict key can only be a small plain value.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from msgspec import Struct

from ckptool.errors import Damaged, Hostile, Problem
from ckptool.serialization.pickle.machine import Machine
from ckptool.serialization.pickle.records import Global, Names, Persistent, PickleValue

_HINT = "do not load this file with torch.load(weights_only=False) or pickle"


class Truncated(Damaged):
    """The pickle ends before its STOP opcode."""


class Loaded(Struct, frozen=True):
    """The content of a pickle.

    ``value`` is the object, ``end`` the offset after its STOP, ``globals`` what it names,
    ``persistent`` all persistent ids, ``hostile`` the problem of each global that can run code.
    """

    value: PickleValue
    end: int
    globals: Names
    persistent: list[Persistent]
    hostile: dict[Global, Problem]


def read_pickle(
    data: bytes, *, what: str, start: int = 0, judges: bool = True, rows: bool = False
) -> Loaded:
    """Read the pickle that begins at ``start``; ``what`` names it in errors.

    With ``rows`` lists and dicts may contain ``Rows``, each of which represents many records; as
    keys of a dict those have as many values.

    Raises Damaged if it is malformed and, if it ``judges``, Hostile if it names a global that can
    run code.
    """
    machine = Machine(data, start, what, rows=rows)
    try:
        value = _run(machine, len(data))
    except Damaged as error:
        remember_globals(data, machine.names(), start)
        require_harmless({} if isinstance(error, Truncated) and not judges else machine.hostile)
        raise
    names = machine.names()
    remember_globals(data, names, start)
    require_harmless(machine.hostile if judges else {})
    return Loaded(value, machine.pos, names, machine.persistent, machine.hostile)


def require_harmless(hostile: Mapping[Global, Problem]) -> None:
    """Raise Hostile for the first global that can run code, if there is one."""
    for problem in hostile.values():
        raise Hostile(problem, hint=_HINT)


def _run(machine: Machine, size: int) -> PickleValue:
    """Run a program; Damaged if it is malformed, Truncated if it has no end."""
    what = machine.what
    try:
        return machine.run()
    except (IndexError, struct.error):
        if machine.pos >= size:
            message = f"{what}: the pickle ends before its last opcode"
            raise Truncated(message, "pickle-malformed") from None
        raise machine.malformed("stack underflow") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError):
        raise machine.malformed("an opcode does not match the stack") from None


_MOST_REMEMBERED = 1024
_recent_globals: dict[bytes, Names] = {}
"""The globals of the most recently read pickles, by the digest of their bytes."""


def _digest(data: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(data).digest()


def remember_globals(data: bytes, names: Names, start: int = 0) -> None:
    """Remember the globals of the first pickle of ``data``, up to where it breaks."""
    if start:
        return
    if len(_recent_globals) >= _MOST_REMEMBERED:
        _recent_globals.clear()
    _recent_globals[_digest(data)] = Names(names, names.records)


def find_globals(data: bytes, *, pickles: int = 1) -> Names:
    """Return all globals of consecutive ``pickles``, with their offsets in ``data``.

    Including those that can run code. A malformed pickle is followed up to where it breaks. One
    that ``read_pickle`` read recently, complete or not, is not followed again.
    """
    names = _recent_globals.get(_digest(data)) if pickles == 1 else None
    return _follow(data, pickles) if names is None else Names(names, names.records)


def _follow(data: bytes, pickles: int) -> Names:
    """Return the globals of consecutive pickles, as far as these can be followed."""
    offsets: dict[Global, int] = {}
    records: set[Global] = set()
    called: set[Global] = set()
    start = 0
    for _ in range(pickles):
        machine = Machine(data, start, "", rows=True)
        is_whole = True
        try:
            _run(machine, len(data))
        except Damaged:
            is_whole = False
        names = machine.names()
        records |= names.records
        called |= names.keys() - names.records
        for item, at in names.items():
            offsets.setdefault(item, start + at)
        if not is_whole:
            break
        start = machine.pos
    return Names(offsets, records - called)
