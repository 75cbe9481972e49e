"""Read a pickle without running it.

A pickle is a program for a stack machine. This machine knows every opcode of protocols 0 to 5 and
builds plain containers; wherever the program names a class or function, it leaves an inert
``Global``, and wherever it would call one, an inert ``Call``. Nothing is imported, nothing is
called. Memory is bounded by the pickle's own size; a dict key can only be a small plain value.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptool.errors import Damaged, Hostile, Problem
from ckptool.formats._pickle_globals import SHARDED_MODULE, can_run_code, is_name
from ckptool.formats._pickle_records import (
    TORCH_SIZE,
    Call,
    Global,
    OrderedMapping,
    Persistent,
)
from ckptool.formats._pickle_rows import Memo, Rows

__all__ = [
    "LARGEST",
    "TORCH_SIZE",
    "Call",
    "Global",
    "Loaded",
    "OrderedMapping",
    "Persistent",
    "Truncated",
    "can_run_code",
    "is_name",
    "load",
    "named_globals",
]

LARGEST = 1 << 29
"""Bytes of the largest pickle that is read."""


_RECORDS = Global | Call | Persistent


_SAFE_KEYS = frozenset([str, Call])
_LONGEST_INTEGER = 1024
_MOST_DIGITS = 3 * _LONGEST_INTEGER
_LARGEST_KEY = 10_000


class _Mark:
    __slots__ = ()


_MARK = _Mark()


class Truncated(Damaged):
    """The pickle ends before its STOP opcode."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a pickle holds.

    ``value`` is the object, ``end`` the offset after its STOP, ``globals`` the offset of the first
    opcode that names each global, ``persistent`` all persistent ids.
    """

    value: Any
    end: int
    globals: dict[Global, int]
    persistent: list[Persistent]


def load(data: bytes, *, what: str, start: int = 0) -> Loaded:
    """Read the pickle that begins at ``start``; ``what`` names it in errors.

    Raises Hostile where it names a global that can run code, Damaged where it is malformed.
    """
    machine = _Machine(data, start, what)
    try:
        value = machine.run()
    except (IndexError, struct.error):
        if machine.pos >= len(data):
            message = f"{what}: the pickle ends before its last opcode"
            raise Truncated(Problem(message, "pickle-malformed")) from None
        raise machine.malformed("an opcode finds too little on the stack") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError):
        raise machine.malformed("an opcode does not fit what it finds") from None
    if not start:
        _remember(data, machine.globals)
    return Loaded(value, machine.pos, machine.globals, machine.persistent)


_MOST_REMEMBERED = 1024
_named_lately: dict[bytes, dict[Global, int]] = {}
"""What the pickles that were read last name, by the digest of their bytes."""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _remember(data: bytes, named: dict[Global, int]) -> None:
    if len(_named_lately) >= _MOST_REMEMBERED:
        _named_lately.clear()
    _named_lately[_digest(data)] = dict(named)


def named_globals(data: bytes, *, pickles: int = 1) -> dict[Global, int]:
    """Every global that ``pickles`` in a row name, and the offset in ``data`` where each first is.

    Those that can run code are among them. A malformed pickle is followed up to where it breaks,
    one that ``load`` read lately not once more.
    """
    known = _named_lately.get(_digest(data)) if pickles == 1 else None
    if known is not None:
        return dict(known)
    found: dict[Global, int] = {}
    start = 0
    for _ in range(pickles):
        machine = _Machine(data, start, "", judges=False)
        is_whole = _follow(machine)
        found |= {item: start + at for item, at in machine.globals.items() if item not in found}
        if not is_whole:
            break
        start = machine.pos
    return found


def _follow(machine: _Machine) -> bool:
    """Run the program as far as it goes; whether that is to its end."""
    with suppress(
        IndexError, struct.error, TypeError, ValueError, KeyError, AttributeError, OverflowError,
        RecursionError, Damaged, Hostile,
    ):  # fmt: skip
        machine.run()
        return True
    return False


class _Machine:
    def __init__(self, data: bytes, start: int, what: str, *, judges: bool = True) -> None:
        self._data = data
        self.pos = start
        self._start = start
        self._what = what
        self._judges = judges
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo = Memo()
        self._rows = Rows(data, self._stack, self._memo)
        self._budget = 4 * len(data) + (1 << 20)
        self._containers = len(data) // 3 + 10_000
        self.globals: dict[Global, int] = {}
        self.persistent: list[Persistent] = []

    def malformed(self, reason: str) -> Damaged:
        place = f"{self._what}: malformed pickle at byte {self.pos - self._start:,}"
        return Damaged(Problem(f"{place}: {reason}", "pickle-malformed"))

    def run(self) -> Any:
        """The object that the program leaves. Opcodes that come by the million are done here."""
        data, table, stack, pos = self._data, _TABLE, self._stack, self.pos
        memo, sparse = self._memo.dense, self._memo.sparse
        last = len(data) - 8
        while True:
            opcode = data[pos]
            if pos < last:
                if opcode == _BINGET and (index := data[pos + 1]) < len(memo):
                    if data[pos + 4] == _MEMOIZE and (end := self._instances(pos)) > pos:
                        pos = end
                        continue
                    stack.append(memo[index])
                    pos += 2
                    continue
                if opcode == _LONG_BINGET and (index := _UINT4(data, pos + 1)[0]) < len(memo):
                    if data[pos + 7] == _MEMOIZE and (end := self._instances(pos)) > pos:
                        pos = end
                        continue
                    stack.append(memo[index])
                    pos += 5
                    continue
                is_next = opcode == _MEMOIZE or (
                    opcode == _LONG_BINPUT and _UINT4(data, pos + 1)[0] == len(memo)
                )
                if is_next and stack and stack[-1] is not _MARK and not sparse:
                    memo.append(stack[-1])
                    pos += 1 if opcode == _MEMOIZE else 5
                    continue
                if opcode == _BININT1:
                    stack.append(data[pos + 1])
                    pos += 2
                    continue
                if opcode == _BININT2:
                    stack.append(data[pos + 1] | data[pos + 2] << 8)
                    pos += 3
                    continue
            self.pos = pos + 1
            if opcode == _STOP:
                return self._pop()
            handler = table.get(opcode)
            if handler is None:
                raise self.malformed(f"unknown opcode 0x{opcode:02x}")
            handler(self)
            pos = self.pos

    def _instances(self, pos: int) -> int:
        """The offset after all instances that begin at ``pos`` and could be read at once."""
        noted = len(self._memo)
        end, instances = self._rows.read(pos)
        self._containers -= instances
        self._require_containers()
        self.charge(len(self._memo) - noted)
        return end

    # Reading arguments

    def _take(self, count: int) -> bytes:
        end = self.pos + count
        if count < 0 or end > len(self._data):
            self.pos = len(self._data)
            raise IndexError
        piece = self._data[self.pos : end]
        self.pos = end
        return piece

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self.pos)
        if end < 0:
            self.pos = len(self._data)
            raise IndexError
        line = self._data[self.pos : end]
        self.pos = end + 1
        return line

    def _uint(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    # Stack

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        self._stack.append(_MARK)

    def _pop_mark(self) -> list[Any]:
        """What lies above the last mark. POP may have dropped marks that are still noted."""
        stack, marks = self._stack, self._marks
        while marks:
            position = marks.pop()
            if position < len(stack) and stack[position] is _MARK:
                items = stack[position + 1 :]
                del stack[position:]
                return items
        raise self.malformed("no mark on the stack")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise self.malformed("a mark where a value is expected")
        return value

    def _drop(self) -> None:
        self._stack.pop()

    def _drop_to_mark(self) -> None:
        self._pop_mark()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    # Plain values

    def _proto(self) -> None:
        version = self._uint(1)
        if version > 5:
            raise self.malformed(f"protocol {version} is newer than 5")

    def _frame(self) -> None:
        self._uint(8)

    def _text_int(self) -> None:
        line = self._line()
        if len(line) > _MOST_DIGITS:
            raise self.malformed(f"an integer of {len(line):,} digits")
        if line in (b"00", b"01"):
            self._push(line == b"01")
        else:
            self._push(int(line.rstrip(b"L"), 10))

    def _long(self, size: int) -> None:
        count = self._uint(size)
        if count > _LONGEST_INTEGER:
            raise self.malformed(f"an integer of {count:,} bytes")
        self._push(int.from_bytes(self._take(count), "little", signed=True))

    def _unicode(self, size: int) -> None:
        self._push(self._take(self._uint(size)).decode("utf-8", "surrogatepass"))

    def _old_string(self, raw: bytes) -> None:
        self._push(raw.decode("latin-1"))

    def _quoted(self) -> None:
        line = self._line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self.malformed("a STRING without quotes")
        self._old_string(line[1:-1].decode("unicode_escape").encode("latin-1"))

    # Containers

    def _container(self, empty: Any) -> None:
        self._containers -= _SET_COSTS if isinstance(empty, set) else 1
        self._require_containers()
        self._push(empty)

    def _require_containers(self) -> None:
        if self._containers < 0:
            raise self.malformed("it builds more containers than a real pickle of its size")

    def _tuple(self, count: int) -> None:
        """A tuple of the last ``count`` values. Where it is a ``torch.Size`` at once, that."""
        stack = self._stack
        items = tuple(stack[-count:])
        if len(items) < count:
            raise IndexError
        if _MARK in items:
            raise self.malformed("a mark where a value is expected")
        del stack[-count:]
        if stack and stack[-1] is TORCH_SIZE and self._follows(_SIZE):
            args = (items,)
            stack[-1] = self._made(Call(TORCH_SIZE, args))
            self._memoize(items, args, stack[-1])
        else:
            stack.append(items)

    def _follows(self, opcodes: bytes) -> bool:
        """Step over these opcodes if they are the next."""
        end = self.pos + len(opcodes)
        if self._data[self.pos : end] != opcodes:
            return False
        self.pos = end
        return True

    def _empty_tuple(self) -> None:
        """An empty tuple. Where it begins an object with a state, all up to that at once."""
        stack = self._stack
        if not self._follows(_BEGIN):
            stack.append(())
            return
        stack[-1] = self._called(self._top(), (), is_new=True)
        self._memoize(stack[-1])
        self._container({})
        self._memoize(stack[-1])
        self._mark()

    def _changed(self) -> Any:
        """What an opcode adds to: no torch.Size, for equal ones can be one record."""
        target = self._stack[-1]
        if isinstance(target, Call) and target.function is TORCH_SIZE:
            raise self.malformed("a torch.Size that is changed")
        return target

    def _append(self, values: list[Any]) -> None:
        target = self._changed()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Call):
            target.items.extend(values)
        else:
            raise self.malformed(f"APPEND to {type(target).__name__}")

    def _set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise self.malformed("a key without a value")
        target = self._changed()
        keys = values[::2]
        pairs = zip(keys, values[1::2], strict=True)
        if isinstance(target, dict):
            if not _SAFE_KEYS.issuperset(map(type, keys)):
                for key in keys:
                    self._key(key)
            target.update(pairs)
        elif isinstance(target, Call):
            target.entries.extend(pairs)
        else:
            raise self.malformed(f"SETITEM on {type(target).__name__}")

    def _set_items_to_mark(self) -> None:
        """Items of a dict. Where it is the state of an object, that object too."""
        self._set_items(self._pop_mark())
        if self._follows(b"b"):
            self._build()

    def _add_items(self) -> None:
        values = self._pop_mark()
        target = self._changed()
        if isinstance(target, set):
            target.update(map(self._key, values))
        elif isinstance(target, Call):
            target.items.extend(values)
        else:
            raise self.malformed(f"ADDITEMS to {type(target).__name__}")

    def _key(self, key: Any) -> Any:
        """A value that may key a dict: plain, small, and of no type whose hash can be chosen."""
        left = [_LARGEST_KEY]
        self._require_key(key, left, 0)
        return key

    def _require_key(self, key: Any, left: list[int], depth: int) -> None:
        left[0] -= 1
        if isinstance(key, tuple) and depth < 4 and left[0] >= len(key):
            for item in key:
                self._require_key(item, left, depth + 1)
        elif isinstance(key, int) and abs(key) > 1 << 64:
            raise self.malformed("a huge integer as a key")
        elif key is not None and not isinstance(key, str | int | float | bytes | _RECORDS):
            raise self.malformed(f"a {type(key).__name__} as a key")

    # Globals and calls

    def _name_global(self, module: Any, name: Any, at: int) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.malformed("a global whose name is not text")
        if not is_name(module) or not is_name(name):
            raise self.malformed("a global whose name is no dotted name")
        item = Global(module, name)
        item = TORCH_SIZE if item == TORCH_SIZE else item
        self.globals.setdefault(item, at)
        if self._judges and can_run_code(item):
            raise Hostile(
                Problem(
                    f"{self._what}: the pickle names {item} at byte {at:,}, which can run code;"
                    " nothing was called",
                    "hostile-global",
                ),
                hint="do not load this file with torch.load(weights_only=False) or pickle",
            )
        self._push(item)

    def _stack_global(self) -> None:
        at = self.pos - 1 - self._start
        name, module = self._pop(), self._pop()
        self._name_global(module, name, at)

    def _refer(self, value: Any) -> None:
        self.persistent.append(Persistent(value))
        self._push(self.persistent[-1])

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise self.malformed("REDUCE without a tuple of arguments")
        self._push(self._called(function, args))

    def _called(self, function: Any, args: tuple[Any, ...], *, is_new: bool = False) -> Any:
        if isinstance(function, Global):
            if function.name == "getattr" and function.module in ("builtins", "__builtin__"):
                return self._get_attribute(args)
            if is_new:
                return self._made(Call(function, args, True))
            plain = _PLAIN.get((function.module, function.name))
            if plain is not None:
                return plain(self, args)
        return self._made(Call(function, args, is_new))

    def _made(self, call: Call) -> Call:
        self.charge(1)
        return call

    def charge(self, count: int) -> None:
        """Count what is built; malformed where that is out of all proportion to the pickle."""
        self._budget -= count
        if self._budget < 0:
            raise self.malformed("it builds far more than its size allows")

    def _get_attribute(self, args: tuple[Any, ...]) -> Any:
        """ShardedTensor pickles reach one nested class through getattr: that pair, no other."""
        sharded = Global(SHARDED_MODULE, "ShardedTensor")
        if not self._judges:
            return Call(Global("builtins", "getattr"), args)
        if args != (sharded, "ProcessGroupState"):
            place = f"at byte {self.pos - self._start:,}"
            message = f"{self._what}: the pickle would call getattr {place}; nothing was called"
            raise Hostile(Problem(message, "hostile-global"))
        return Global(sharded.module, "ShardedTensor.ProcessGroupState")

    def _new_object(self) -> None:
        args, cls = self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise self.malformed("NEWOBJ without a tuple of arguments")
        self._push(self._called(cls, args, is_new=True))

    def _new_object_ex(self) -> None:
        keywords, args, cls = self._pop(), self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise self.malformed("NEWOBJ_EX without a tuple of arguments")
        self._push(self._called(cls, (*args, keywords), is_new=True))

    def _inst(self) -> None:
        at = self.pos - 1 - self._start
        module, name = self._line().decode(), self._line().decode()
        args = tuple(self._pop_mark())
        self._name_global(module, name, at)
        self._push(self._called(self._pop(), args, is_new=True))

    def _obj(self) -> None:
        cls, *args = self._pop_mark()
        self._push(self._called(cls, tuple(args), is_new=True))

    def _build(self) -> None:
        state = self._pop()
        target = self._changed()
        if not isinstance(target, Call | OrderedMapping):
            raise self.malformed(f"BUILD on {type(target).__name__}")
        target.state = state

    # Memo

    def _get(self, index: int) -> None:
        try:
            value = self._memo[index]
        except LookupError:
            raise self.malformed(f"memo {index} was never set") from None
        self._push(value)

    def _put(self, index: int) -> None:
        self._memo.put(index, self._top())

    def _memoize(self, *values: Any) -> None:
        for value in values:
            self._memo.put(len(self._memo), value)

    def _top(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:
            raise self.malformed("a mark where a value is expected")
        return value

    def _global_line(self) -> None:
        at = self.pos - 1 - self._start
        module, name = self._line().decode(), self._line().decode()
        self._name_global(module, name, at)

    def _dict_from_mark(self) -> None:
        values = self._pop_mark()
        self._push({})
        self._set_items(values)


def _ordered(machine: _Machine, args: tuple[Any, ...]) -> OrderedMapping:
    if not args:
        return OrderedMapping()
    pairs = list(args[0].items() if isinstance(args[0], dict) else args[0])
    machine.charge(len(pairs))
    return OrderedMapping((machine._key(key), value) for key, value in pairs)


def _encoded(machine: _Machine, args: tuple[Any, ...]) -> bytes:
    """Python 3 writes bytes in protocol 2 as ``_codecs.encode(text, 'latin1')``."""
    text, *rest = args
    if not isinstance(text, str) or rest not in (["latin1"], ["latin-1"]):
        raise machine.malformed("_codecs.encode with another codec than latin1")
    machine.charge(len(text))
    return text.encode("latin-1")


def _set(machine: _Machine, args: tuple[Any, ...]) -> set[Any]:
    items = list(args[0]) if args else []
    machine.charge(len(items))
    return {machine._key(item) for item in items}


def _frozenset(machine: _Machine, args: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(_set(machine, args))


def _complex(machine: _Machine, args: tuple[Any, ...]) -> complex:
    return complex(*map(float, args))


def _bytes(machine: _Machine, args: tuple[Any, ...]) -> bytes:
    if not args:
        return b""
    if not isinstance(args[0], bytes | list):
        raise machine.malformed("bytes of something else than bytes")
    machine.charge(len(args[0]))
    return bytes(args[0])


def _bytearray(machine: _Machine, args: tuple[Any, ...]) -> bytearray:
    if len(args) == 2 and isinstance(args[0], str):
        machine.charge(len(args[0]))
        return bytearray(args[0].encode("latin-1"))
    return bytearray(_bytes(machine, args))


_PLAIN: dict[tuple[str, str], Callable[[_Machine, tuple[Any, ...]], Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("_codecs", "encode"): _encoded,
}
for _module in ("builtins", "__builtin__"):
    _PLAIN |= {
        (_module, "set"): _set,
        (_module, "frozenset"): _frozenset,
        (_module, "complex"): _complex,
        (_module, "bytes"): _bytes,
        (_module, "bytearray"): _bytearray,
    }

_SET_COSTS = 4
"""An empty set takes as much memory as four empty lists."""
_STOP, _MEMOIZE = ord("."), 0x94
_BINGET, _LONG_BINGET, _LONG_BINPUT, _BININT1, _BININT2 = map(ord, "hjrKM")
_SIZE = b"\x94\x85\x94R\x94"
"""MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE: behind a tuple of sizes, as protocol 4 writes it."""
_BEGIN = b"\x81\x94}\x94("
"""NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: behind the empty tuple that makes an object."""
_UINT4 = struct.Struct("<I").unpack_from
_Handler = Callable[[_Machine], None]


def _table() -> dict[int, _Handler]:
    m = _Machine
    push = m._push
    by_text: dict[bytes, _Handler] = {
        b"(": m._mark,
        b"0": m._drop,
        b"1": m._drop_to_mark,
        b"2": lambda s: push(s, s._top()),
        b"F": lambda s: push(s, float(s._line())),
        b"I": m._text_int,
        b"J": lambda s: push(s, struct.unpack("<i", s._take(4))[0]),
        b"K": lambda s: push(s, s._uint(1)),
        b"L": m._text_int,
        b"M": lambda s: push(s, s._uint(2)),
        b"N": lambda s: push(s, None),
        b"P": lambda s: s._refer(s._line().decode()),
        b"Q": lambda s: s._refer(s._pop()),
        b"R": m._reduce,
        b"S": m._quoted,
        b"T": lambda s: s._old_string(s._take(s._uint(4))),
        b"U": lambda s: s._old_string(s._take(s._uint(1))),
        b"V": lambda s: push(s, s._line().decode("raw-unicode-escape")),
        b"X": lambda s: s._unicode(4),
        b"a": lambda s: s._append([s._pop()]),
        b"b": m._build,
        b"c": m._global_line,
        b"d": m._dict_from_mark,
        b"}": lambda s: s._container({}),
        b"e": lambda s: s._append(s._pop_mark()),
        b"g": lambda s: s._get(int(s._line())),
        b"h": lambda s: s._get(s._uint(1)),
        b"i": m._inst,
        b"j": lambda s: s._get(s._uint(4)),
        b"l": lambda s: push(s, s._pop_mark()),
        b"]": lambda s: s._container([]),
        b"o": m._obj,
        b"p": lambda s: s._put(int(s._line())),
        b"q": lambda s: s._put(s._uint(1)),
        b"r": lambda s: s._put(s._uint(4)),
        b"s": lambda s: s._set_items([s._pop(), s._pop()][::-1]),
        b"t": lambda s: push(s, tuple(s._pop_mark())),
        b")": m._empty_tuple,
        b"u": m._set_items_to_mark,
        b"G": lambda s: push(s, struct.unpack(">d", s._take(8))[0]),
        b"\x80": m._proto,
        b"\x81": m._new_object,
        b"\x85": lambda s: s._tuple(1),
        b"\x86": lambda s: s._tuple(2),
        b"\x87": lambda s: s._tuple(3),
        b"\x88": lambda s: push(s, True),
        b"\x89": lambda s: push(s, False),
        b"\x8a": lambda s: s._long(1),
        b"\x8b": lambda s: s._long(4),
        b"B": lambda s: push(s, s._take(s._uint(4))),
        b"C": lambda s: push(s, s._take(s._uint(1))),
        b"\x8c": lambda s: s._unicode(1),
        b"\x8d": lambda s: s._unicode(8),
        b"\x8e": lambda s: push(s, s._take(s._uint(8))),
        b"\x8f": lambda s: s._container(set()),
        b"\x90": m._add_items,
        b"\x91": lambda s: push(s, frozenset(map(s._key, s._pop_mark()))),
        b"\x92": m._new_object_ex,
        b"\x93": m._stack_global,
        b"\x94": lambda s: s._memoize(s._top()),
        b"\x95": m._frame,
        b"\x96": lambda s: push(s, bytearray(s._take(s._uint(8)))),
    }
    return {key[0]: handler for key, handler in by_text.items()}


_TABLE = _table()
