"""Calls that make plain values, which replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptool.serialization.pickle.builder import Builder
from ckptool.serialization.pickle.records import OrderedMapping, PickleValue


def _make_ordered(builder: Builder, args: tuple[Any, ...]) -> OrderedMapping:
    if not args:
        return OrderedMapping()
    pairs = list(args[0].items() if isinstance(args[0], dict) else args[0])
    builder.charge(len(pairs))
    return OrderedMapping((builder.key(key), value) for key, value in pairs)


def _encode(builder: Builder, args: tuple[Any, ...]) -> bytes:
    """Return bytes, which Python 3 writes in protocol 2 as ``_codecs.encode(text, 'latin1')``."""
    text, *rest = args
    if not isinstance(text, str) or rest not in (["latin1"], ["latin-1"]):
        raise builder.malformed("_codecs.encode with a codec other than latin1")
    builder.charge(len(text))
    return text.encode("latin-1")


def _set(builder: Builder, args: tuple[Any, ...]) -> set[PickleValue]:
    items = list(args[0]) if args else []
    builder.charge(len(items))
    builder.require_keys(items)
    return set(items)


def _bytes(builder: Builder, args: tuple[Any, ...]) -> bytes:
    if not args:
        return b""
    if not isinstance(args[0], bytes | list):
        raise builder.malformed("bytes made from something other than bytes")
    builder.charge(len(args[0]))
    return bytes(args[0])


def _bytearray(builder: Builder, args: tuple[Any, ...]) -> bytearray:
    if len(args) == 2 and isinstance(args[0], str):
        builder.charge(len(args[0]))
        return bytearray(args[0].encode("latin-1"))
    return bytearray(_bytes(builder, args))


PLAIN: dict[tuple[str, str], Callable[[Builder, tuple[Any, ...]], PickleValue]] = {
    ("collections", "OrderedDict"): _make_ordered,
    ("_codecs", "encode"): _encode,
}
for _module in ("builtins", "__builtin__"):
    PLAIN |= {
        (_module, "set"): _set,
        (_module, "frozenset"): lambda builder, args: frozenset(_set(builder, args)),
        (_module, "complex"): lambda _, args: complex(*map(float, args)),
        (_module, "bytes"): _bytes,
        (_module, "bytearray"): _bytearray,
    }
