"""The machine that follows a pickle's opcodes and calls nothing.

The calls in a pickle that make plain values: what they return, without calling anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckptool.errors import Hostile, Problem
from ckptool.serialization.pickle.builder import MARK, Builder
from ckptool.serialization.pickle.globals import GETATTR, SHARDED_MODULE, can_run_code, is_name
from ckptool.serialization.pickle.instances import Rows
from ckptool.serialization.pickle.records import (
    TORCH_SIZE,
    Call,
    Global,
    OrderedMapping,
    Persistent,
)

_STOP, _MEMOIZE = ord("."), 0x94
_BINGET, _LONG_BINGET, _LONG_BINPUT, _BININT1, _BININT2 = map(ord, "hjrKM")
_BEGIN = b"\x81\x94}\x94("
"""NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: behind the empty tuple that makes an object."""
HOSTILE_HINT = "do not load this file with torch.load(weights_only=False) or pickle"
_UINT4 = struct.Struct("<I").unpack_from


class Machine(Builder):
    """Follows one program. With ``judges`` it raises Hostile at a global that can run code.

    ``globals`` are the byte of the opcode that first names each, ``persistent`` all persistent ids,
    ``hostile`` what is wrong with each global that can run code, where it does not judge.
    """

    def __init__(self, data: bytes, start: int, what: str, *, judges: bool = True) -> None:
        super().__init__(data, start, what)
        self._judges = judges
        self._rows = Rows(data, self._stack, self._memo)
        self.globals: dict[Global, int] = {}
        self.persistent: list[Persistent] = []
        self.hostile: dict[Global, Problem] = {}

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
                if is_next and stack and stack[-1] is not MARK and not sparse:
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

    def _name_global(self, module: Any, name: Any, at: int) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.malformed("a global whose name is not text")
        item = Global(module, name)
        item = TORCH_SIZE if item == TORCH_SIZE else item
        if item not in self.globals:
            if not is_name(module) or not is_name(name):
                raise self.malformed("a global whose name is not a dotted name")
            self.globals[item] = at
            if can_run_code(item):
                self._accuse(item, f"names {item} at byte {at:,}, which can run code")
        self._push(item)

    def _accuse(self, item: Global, deed: str) -> None:
        """Raise Hostile, or note what the pickle does with this global."""
        problem = Problem(f"{self.what}: the pickle {deed}; nothing was called", "hostile-global")
        if self._judges:
            raise Hostile(problem, hint=HOSTILE_HINT)
        self.hostile.setdefault(item, problem)

    def _stack_global(self) -> None:
        at = self.pos - 1 - self._start
        name, module = self._pop(), self._pop()
        self._name_global(module, name, at)

    def _global_line(self) -> None:
        at = self.pos - 1 - self._start
        module, name = self._line().decode(), self._line().decode()
        self._name_global(module, name, at)

    def _refer(self, value: Any) -> None:
        """A persistent id; that of a module's class, as the legacy format has it, is the class."""
        if isinstance(value, tuple) and len(value) == 4 and value[0] == "module":
            self._push(value[1])
            return
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
            plain = PLAIN.get((function.module, function.name))
            if plain is not None:
                return plain(self, args)
        return self._made(Call(function, args, is_new))

    def _get_attribute(self, args: tuple[Any, ...]) -> Any:
        """ShardedTensor pickles reach one nested class through getattr: that pair, no other."""
        sharded = Global(SHARDED_MODULE, "ShardedTensor")
        if args == (sharded, "ProcessGroupState"):
            return Global(sharded.module, "ShardedTensor.ProcessGroupState")
        self._accuse(GETATTR, f"would call getattr at byte {self.pos - self._start:,}")
        return self._made(Call(GETATTR, args))

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


_Handler = Callable[[Machine], None]


def _table() -> dict[int, _Handler]:
    m = Machine
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
        b"\x91": lambda s: push(s, frozenset(map(s.key, s._pop_mark()))),
        b"\x92": m._new_object_ex,
        b"\x93": m._stack_global,
        b"\x94": lambda s: s._memoize(s._top()),
        b"\x95": m._frame,
        b"\x96": lambda s: push(s, bytearray(s._take(s._uint(8)))),
    }
    return {key[0]: handler for key, handler in by_text.items()}


_TABLE = _table()


def _ordered(builder: Builder, args: tuple[Any, ...]) -> OrderedMapping:
    if not args:
        return OrderedMapping()
    pairs = list(args[0].items() if isinstance(args[0], dict) else args[0])
    builder.charge(len(pairs))
    return OrderedMapping((builder.key(key), value) for key, value in pairs)


def _encoded(builder: Builder, args: tuple[Any, ...]) -> bytes:
    """Python 3 writes bytes in protocol 2 as ``_codecs.encode(text, 'latin1')``."""
    text, *rest = args
    if not isinstance(text, str) or rest not in (["latin1"], ["latin-1"]):
        raise builder.malformed("_codecs.encode with a codec other than latin1")
    builder.charge(len(text))
    return text.encode("latin-1")


def _set(builder: Builder, args: tuple[Any, ...]) -> set[Any]:
    items = list(args[0]) if args else []
    builder.charge(len(items))
    builder.require_keys(items)
    return set(items)


def _frozenset(builder: Builder, args: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(_set(builder, args))


def _complex(builder: Builder, args: tuple[Any, ...]) -> complex:
    return complex(*map(float, args))


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


PLAIN: dict[tuple[str, str], Callable[[Builder, tuple[Any, ...]], Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("_codecs", "encode"): _encoded,
}
for _module in ("builtins", "__builtin__"):
    PLAIN |= {
        (_module, "set"): _set,
        (_module, "frozenset"): _frozenset,
        (_module, "complex"): _complex,
        (_module, "bytes"): _bytes,
        (_module, "bytearray"): _bytearray,
    }
