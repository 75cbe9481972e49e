"""The machine that follows a pickle's opcodes and calls nothing."""

from __future__ import annotations

import pickle  # the names of its opcodes
import struct
import sys
from collections.abc import Callable

from ckptool.errors import Damaged, Problem
from ckptool.serialization.pickle.builder import MARK, Builder
from ckptool.serialization.pickle.globals import (
    GETATTR,
    SHARDED_MODULE,
    can_run_code,
    is_class,
    is_member,
    is_name,
)
from ckptool.serialization.pickle.instances import InstanceReader
from ckptool.serialization.pickle.plain import PLAIN
from ckptool.serialization.pickle.records import (
    MOST_SINGLE,
    TORCH_SIZE,
    Call,
    Global,
    Names,
    Persistent,
    PickleValue,
)
from ckptool.serialization.pickle.row_reader import LEAST

_STOP, _MEMOIZE = pickle.STOP[0], pickle.MEMOIZE[0]
_BININT1, _BININT2 = pickle.BININT1[0], pickle.BININT2[0]
_BINGET, _LONG_BINGET, _LONG_BINPUT = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.LONG_BINPUT[0]
_GETS = _BINGET, _LONG_BINGET
_LEAST_REPEATED = 1 << 14
"""Bytes of a pickle that is searched for repeated instances; a smaller one takes a millisecond."""
_UINT4 = struct.Struct("<I").unpack_from
_FRAME = pickle.FRAME[0]
_NO_FRAME = sys.maxsize
"""Where a frame ends if there is none."""


class Machine(Builder):
    """Follows one program.

    ``globals`` are the byte of the opcode that first names each, ``persistent`` all persistent ids,
    ``hostile`` the problem of each global that can run code. If it may leave ``rows``, these
    represent many instances in lists and dicts.
    """

    def __init__(self, data: bytes, start: int, what: str, *, rows: bool = False) -> None:
        super().__init__(data, start, what)
        self._has_rows = rows
        self._end = start + MOST_SINGLE
        self._frame_end = _NO_FRAME
        is_large = len(data) - start >= _LEAST_REPEATED
        self._reader = InstanceReader(data, self._stack, self._memo) if is_large else None
        self.globals: dict[Global, int] = {}
        self.persistent: list[Persistent] = []
        self.hostile: dict[Global, Problem] = {}
        self._record_classes: set[Global] = set()
        self._called: set[Global] = set()
        self._has_members = False

    def names(self) -> Names:
        """Return what the program has named so far."""
        return Names(self.globals, filter(is_class, self._record_classes - self._called))

    def run(self) -> PickleValue:
        """Run the program and return its result. Millions of opcodes are handled here."""
        data, table, stack, pos = self._data, _TABLE, self._stack, self.pos
        memo, sparse = self._memo.dense, self._memo.sparse
        last, plain, hidden = self._last(), self._memo.plain, self._memo.hidden
        reader = self._reader
        while True:
            opcode = data[pos]
            if pos < last:
                if opcode in _GETS:
                    following = pos + (2 if opcode == _BINGET else 5)
                    index = data[pos + 1] if opcode == _BINGET else _UINT4(data, pos + 1)[0]
                    if index < len(memo) + hidden:
                        if reader is not None and data[following + 2] == _MEMOIZE:
                            end = self._instances(reader, pos)
                            if end > pos:
                                pos, plain, hidden = end, self._memo.plain, self._memo.hidden
                                last = self._last()
                                continue
                        stack.append(memo[index] if index < plain else self._memo[index])
                        pos = following
                        continue
                is_next = opcode == _MEMOIZE or (
                    opcode == _LONG_BINPUT and _UINT4(data, pos + 1)[0] == len(memo) + hidden
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
            if opcode == _STOP and pos <= self._frame_end:
                value: PickleValue = self._pop()
                return value
            handler = table.get(opcode)
            if handler is None or pos >= self._frame_end or pos > self._end:
                self._pass_edge(pos, opcode)
                pos, last = self.pos, self._last()
                continue
            handler(self)
            pos = self.pos

    def _last(self) -> int:
        """Return up to where opcodes of a few bytes may be read without a further check."""
        return min(len(self._data) - 8, self._end, self._frame_end)

    def _pass_edge(self, pos: int, opcode: int) -> None:
        """End a frame at ``pos``, or begin one; Damaged if that is not possible there.

        Of an opcode across the end of a frame Python skips the bytes inside, if it reads a file.
        """
        if pos > self._frame_end:
            raise self.malformed("a frame that ends inside an opcode")
        if pos == self._frame_end:
            self.pos, self._frame_end = pos, _NO_FRAME
        elif opcode != _FRAME:
            raise self._explain_stop(opcode)
        elif self._frame_end != _NO_FRAME:
            raise self.malformed("a frame inside another")
        else:
            size = self._uint(8)
            self._begin_frame(self.pos + size)

    def _begin_frame(self, end: int) -> None:
        """Note where a frame ends; IndexError if beyond the program, as Python reads it whole."""
        if end > len(self._data):
            self.pos = len(self._data)
            raise IndexError
        self._frame_end = end

    def _explain_stop(self, opcode: int) -> Damaged:
        """Return why an opcode is not followed: it is unknown, or there were too many."""
        if opcode not in _TABLE:
            return self.malformed(f"unknown opcode 0x{opcode:02x}")
        return self.malformed(f"more than {MOST_SINGLE:,} bytes that are not records alike")

    def _instances(self, reader: InstanceReader, pos: int) -> int:
        """Return the offset after all instances that begin at ``pos`` and were read at once."""
        most = len(self._data)
        if self._has_rows and self._marks:
            is_key = (len(self._stack) - self._marks[-1]) % 2 == 1
            if (end := self._add_rows(reader, pos, is_key=is_key)) > pos:
                return end
            most = LEAST if is_key else 1
        noted = len(self._memo)
        end, instances = reader.read(pos, min(self._end, self._frame_end), most)
        self._containers -= instances
        self._require_containers()
        self.charge(len(self._memo) - noted)
        return end

    def _add_rows(self, reader: InstanceReader, pos: int, *, is_key: bool) -> int:
        """Add instances to their list or dict, up to the end of a batch; return the offset there.

        What the stack has for it is added before them, as if a batch ended at ``pos``.
        """
        stack, mark = self._stack, self._marks[-1]
        target = stack[mark - 1] if 0 < mark < len(stack) and stack[mark] is MARK else None
        is_dict = isinstance(target, dict)
        if not (is_key if is_dict else isinstance(target, list)):
            return pos
        rows = reader.read_rows(pos, self._frame_end, is_dict=is_dict)
        if rows is None:
            return pos
        runs, end, frame_end = rows
        if frame_end != self._frame_end:
            self._begin_frame(frame_end)
        self.pos = pos
        (self._set_items if is_dict else self._extend)(self._pop_mark())
        if isinstance(target, dict):
            for keys, values in (run.rows for run in runs):
                target[keys] = values
        elif isinstance(target, list):
            target += (run.rows[0] for run in runs)
        self._mark()
        self._end += end - pos
        return end

    def _name_global(self, module: PickleValue, name: PickleValue, at: int) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.malformed("a global whose name is not text")
        item = Global(module, name)
        item = TORCH_SIZE if item == TORCH_SIZE else item
        if item not in self.globals:
            if not is_name(module) or not is_name(name):
                raise self.malformed("a global whose name is not a dotted name")
            owner, _, member = name.rpartition(".")
            if is_member(Global(module, owner), member):
                self._name_global(module, owner, at)
                self._push(self._member((self._pop(), member)))
                return
            self.globals[item] = at
            if can_run_code(item):
                self._accuse(item, f"names {item} at byte {at:,}, which can run code")
        self._push(item)

    def _accuse(self, item: Global, deed: str) -> None:
        """Note what the pickle does with a global that can run code."""
        problem = Problem(f"{self.what}: the pickle {deed}; nothing was called", "hostile-global")
        self.hostile.setdefault(item, problem)

    def _stack_global(self) -> None:
        at = self.pos - 1 - self._start
        name, module = self._pop(), self._pop()
        self._name_global(module, name, at)

    def _global_line(self) -> None:
        at = self.pos - 1 - self._start
        module, name = self._line().decode(), self._line().decode()
        self._name_global(module, name, at)

    def _refer(self, value: PickleValue) -> None:
        """Push a persistent id; or for a module's class, as in the legacy format, the class."""
        if isinstance(value, tuple) and len(value) == 4 and value[0] == "module":
            self._push(value[1])
            return
        self.persistent.append(Persistent(value))
        self._push(self.persistent[-1])

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        self._push(self._answer(function, args))

    def _new_object(self) -> None:
        args, cls = self._pop(), self._pop()
        self._push(self._answer(cls, args, is_new=True))

    def _new_object_ex(self) -> None:
        keywords, args, cls = self._pop(), self._pop(), self._pop()
        all_args = (*args, keywords) if isinstance(args, tuple) else args
        self._push(self._answer(cls, all_args, is_new=True))

    def _answer(
        self, function: PickleValue, args: PickleValue, *, is_new: bool = False
    ) -> PickleValue:
        """Return a plain value if the call would make one, else the call as a record."""
        if not isinstance(args, tuple):
            raise self.malformed("a call without a tuple of arguments")
        if not isinstance(function, Global | Call):
            raise self.malformed(f"a call of what is a {type(function).__name__}")
        if isinstance(function, Global):
            if function.name == "getattr" and function.module in ("builtins", "__builtin__"):
                return self._get_attribute(args)
            plain = None if is_new else PLAIN.get((function.module, function.name))
            if plain is not None:
                return plain(self, args)
            (self._record_classes if is_new else self._called).add(function)
        self._called.update(arg for arg in args if isinstance(arg, Global))
        if self._has_members and (isinstance(function, Call) or self._pass_member(args)):
            self._accuse(GETATTR, f"would call an attribute at byte {self.pos - self._start:,}")
        self.charge(1)
        return Call(function, args, is_new)

    def _get_attribute(self, args: tuple[PickleValue, ...]) -> PickleValue:
        """Resolve ``getattr``, by which ShardedTensor pickles reach one nested class.

        Of other classes it may reach members that nothing calls: enumerations of Python 3.11.0 to
        3.11.3, and functions in protocol 2, such as those in mmengine's ``HistoryBuffer``.
        """
        sharded = Global(SHARDED_MODULE, "ShardedTensor")
        if args == (sharded, "ProcessGroupState"):
            return Global(sharded.module, "ShardedTensor.ProcessGroupState")
        if len(args) == 2 and is_member(*args):
            return self._member(args)
        self._accuse(GETATTR, f"would call getattr at byte {self.pos - self._start:,}")
        self.charge(1)
        return Call(GETATTR, args)

    def _member(self, args: tuple[PickleValue, ...]) -> Call:
        """Return the record of a class's member."""
        self.charge(1)
        self._has_members = True
        return Call(GETATTR, args)

    def _pass_member(self, args: tuple[PickleValue, ...]) -> bool:
        """Return whether a member is among the arguments of a call, which could call it."""
        stack, ids = [*args], set[int]()
        while stack:
            item = stack.pop()
            if isinstance(item, Call) and item.function == GETATTR:
                return True
            if isinstance(item, tuple | list | dict | set | frozenset) and id(item) not in ids:
                ids.add(id(item))
                self.charge(len(item))
                stack += [*item, *item.values()] if isinstance(item, dict) else item
        return False

    def _inst(self) -> None:
        args = tuple(self._pop_mark())
        self._global_line()
        self._push(self._answer(self._pop(), args, is_new=True))

    def _obj(self) -> None:
        cls, *args = self._pop_mark()
        self._push(self._answer(cls, tuple(args), is_new=True))


_HANDLERS: dict[bytes, Callable[[Machine], object]] = {
    pickle.MARK: Machine._mark,
    pickle.POP: lambda m: m._stack.pop(),
    pickle.POP_MARK: Machine._pop_mark,
    pickle.DUP: lambda m: m._push(m._top()),
    pickle.FLOAT: Machine._text_float,
    pickle.INT: Machine._text_int,
    pickle.BININT: lambda m: m._push(struct.unpack("<i", m._take(4))[0]),
    pickle.BININT1: lambda m: m._push(m._uint(1)),
    pickle.LONG: Machine._text_long,
    pickle.BININT2: lambda m: m._push(m._uint(2)),
    pickle.NONE: lambda m: m._push(None),
    pickle.PERSID: lambda m: m._refer(m._line().decode()),
    pickle.BINPERSID: lambda m: m._refer(m._pop()),
    pickle.REDUCE: Machine._reduce,
    pickle.STRING: Machine._quoted,
    pickle.BINSTRING: lambda m: m._old_string(m._take(m._uint(4))),
    pickle.SHORT_BINSTRING: lambda m: m._old_string(m._take(m._uint(1))),
    pickle.UNICODE: lambda m: m._push(m._line().decode("raw-unicode-escape")),
    pickle.BINUNICODE: lambda m: m._unicode(4),
    pickle.APPEND: lambda m: m._extend([m._pop()]),
    pickle.BUILD: Machine._build,
    pickle.GLOBAL: Machine._global_line,
    pickle.DICT: Machine._dict_from_mark,
    pickle.EMPTY_DICT: lambda m: m._container({}),
    pickle.APPENDS: lambda m: m._extend(m._pop_mark()),
    pickle.GET: lambda m: m._get(int(m._line())),
    pickle.BINGET: lambda m: m._get(m._uint(1)),
    pickle.INST: Machine._inst,
    pickle.LONG_BINGET: lambda m: m._get(m._uint(4)),
    pickle.LIST: lambda m: m._push(m._pop_mark()),
    pickle.EMPTY_LIST: lambda m: m._container([]),
    pickle.OBJ: Machine._obj,
    pickle.PUT: lambda m: m._put(int(m._line())),
    pickle.BINPUT: lambda m: m._put(m._uint(1)),
    pickle.LONG_BINPUT: lambda m: m._put(m._uint(4)),
    pickle.SETITEM: lambda m: m._set_items([m._pop(), m._pop()][::-1]),
    pickle.TUPLE: lambda m: m._push(tuple(m._pop_mark())),
    pickle.EMPTY_TUPLE: lambda m: m._push(()),
    pickle.SETITEMS: lambda m: m._set_items(m._pop_mark()),
    pickle.BINFLOAT: lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
    pickle.PROTO: Machine._proto,
    pickle.NEWOBJ: Machine._new_object,
    pickle.TUPLE1: lambda m: m._tuple(1),
    pickle.TUPLE2: lambda m: m._tuple(2),
    pickle.TUPLE3: lambda m: m._tuple(3),
    pickle.NEWTRUE: lambda m: m._push(True),
    pickle.NEWFALSE: lambda m: m._push(False),
    pickle.LONG1: lambda m: m._long(1),
    pickle.LONG4: lambda m: m._long(4),
    pickle.BINBYTES: lambda m: m._push(m._take(m._uint(4))),
    pickle.SHORT_BINBYTES: lambda m: m._push(m._take(m._uint(1))),
    pickle.SHORT_BINUNICODE: lambda m: m._unicode(1),
    pickle.BINUNICODE8: lambda m: m._unicode(8),
    pickle.BINBYTES8: lambda m: m._push(m._take(m._uint(8))),
    pickle.EMPTY_SET: lambda m: m._container(set()),
    pickle.ADDITEMS: Machine._add_items,
    pickle.FROZENSET: lambda m: m._push(frozenset(map(m.key, m._pop_mark()))),
    pickle.NEWOBJ_EX: Machine._new_object_ex,
    pickle.STACK_GLOBAL: Machine._stack_global,
    pickle.MEMOIZE: Machine._memoize,
    pickle.BYTEARRAY8: lambda m: m._push(bytearray(m._take(m._uint(8)))),
}
_TABLE = {opcode[0]: handler for opcode, handler in _HANDLERS.items()}
