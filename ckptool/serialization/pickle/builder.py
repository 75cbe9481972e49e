"""The stack of the pickle machine, and the plain values and containers that opcodes build on it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ckptool.errors import Damaged
from ckptool.serialization.pickle.memo import Memo
from ckptool.serialization.pickle.records import (
    MOST_SINGLE,
    TORCH_SIZE,
    Call,
    Global,
    OrderedMapping,
    Persistent,
    PickleValue,
)


class _Mark:
    __slots__ = ()


MARK = _Mark()


class Stack:
    """A program at a position, and what its opcodes have pushed.

    IndexError means that the program or the stack ends too early, Damaged any other defect.
    """

    def __init__(self, data: bytes, start: int, what: str) -> None:
        self._data = data
        self.pos = start
        self._start = start
        self.what = what
        self._stack: list[Any] = []
        self._marks: list[int] = []

    def malformed(self, reason: str) -> Damaged:
        """Return the error for a defect at the current position."""
        place = f"{self.what}: malformed pickle at byte {self.pos - self._start:,}"
        return Damaged(f"{place}: {reason}", "pickle-malformed")

    def _take(self, count: int) -> bytes:
        end = self.pos + count
        if count < 0 or end > len(self._data) or count > MOST_SINGLE:
            self.pos = len(self._data)
            raise IndexError
        piece = self._data[self.pos : end]
        self.pos = end
        return piece

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self.pos, self.pos + MOST_SINGLE)
        if end < 0:
            self.pos = len(self._data)
            raise IndexError
        line = self._data[self.pos : end]
        self.pos = end + 1
        return line

    def _uint(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        self._stack.append(MARK)

    def _pop_mark(self) -> list[Any]:
        """Pop everything above the last mark. POP may have dropped marks that are still noted."""
        stack, marks = self._stack, self._marks
        while marks:
            position = marks.pop()
            if position < len(stack) and stack[position] is MARK:
                items = stack[position + 1 :]
                del stack[position:]
                return items
        raise self.malformed("no mark on the stack")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is MARK:
            raise self.malformed("a mark where a value is expected")
        return value

    def _push(self, value: PickleValue) -> None:
        self._stack.append(value)

    def _top(self) -> Any:
        value = self._stack[-1]
        if value is MARK:
            raise self.malformed("a mark where a value is expected")
        return value


_RECORDS = Global | Call | Persistent

_TEXT, _RECORD, _INTEGER = {str}, {Call}, {int}
_WIDEST_KEY = 1 << 64
_LONGEST_INTEGER = 1024
"""Bytes of an integer: numpy's random states have some of up to 256 bits."""
_ESCAPE = re.compile(rb"\\(?:[\\'\"nrt]|x[0-9a-fA-F]{2})")
_DECIMAL = re.compile(rb"0|-?[1-9][0-9]*")
_FLOAT = re.compile(rb"-?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|inf|nan)")
_MOST_DIGITS = 3 * _LONGEST_INTEGER
"""A byte has up to 2.4 digits; Python converts no more than 4,300, to save time."""
_LARGEST_KEY = 10_000
"""Parts of a key, which is hashed again for each dict that it keys."""
_COST = 4
"""A part of a key costs as much time as four other values."""
_AT_ONCE = 6
"""Text is compared 2**6 characters at a time, for its cost."""
_CONTAINER_NBYTES = 2
"""Of a pickle for a list or dict, which takes 60 in memory: an opcode, and protocol 4's MEMOIZE."""
_SET_COSTS = 3
"""A set takes 216 in memory; one of a pickle's with an item has six bytes: MARK, item, ADDITEMS."""


class Builder(Stack):
    """A stack with operations that build values on it, and the memo.

    What it builds is bounded by the size of the program; a dict key can only be a small plain
    value.
    """

    def __init__(self, data: bytes, start: int, what: str) -> None:
        super().__init__(data, start, what)
        self._memo = Memo()
        size = min(len(data), MOST_SINGLE)
        self._budget = 4 * size + (1 << 20)
        self._containers = size // _CONTAINER_NBYTES + 10_000
        self._tuples: set[int] = set()
        self._collisions: dict[int, int] = {}

    def _proto(self) -> None:
        version = self._uint(1)
        if version > 5:
            raise self.malformed(f"protocol {version} is newer than 5")

    def _text_int(self) -> None:
        line = self._line()
        if line in (b"00", b"01"):
            self._push(line == b"01")
        else:
            self._push(self._decimal(line))

    def _text_long(self) -> None:
        self._push(self._decimal(self._line().removesuffix(b"L")))

    def _decimal(self, digits: bytes) -> int:
        """Return an integer in decimal digits: Python takes others for octal, or refuses them."""
        if len(digits) > _MOST_DIGITS:
            raise self.malformed(f"an integer of {len(digits):,} digits")
        if not _DECIMAL.fullmatch(digits):
            raise self.malformed("an integer that is not written as Python writes it")
        return int(digits)

    def _text_float(self) -> None:
        line = self._line()
        value = float(line) if _FLOAT.fullmatch(line) else math.nan
        if not math.isfinite(value) and line.lstrip(b"-") not in (b"inf", b"nan"):
            raise self.malformed("a float that is not written as Python writes it")
        self._push(value)

    def _long(self, size: int) -> None:
        count = self._uint(size)
        if count > _LONGEST_INTEGER:
            raise self.malformed(f"an integer of {count:,} bytes")
        self._push(int.from_bytes(self._take(count), "little", signed=True))

    def _unicode(self, size: int) -> None:
        self._push(self._take(self._uint(size)).decode("utf-8", "surrogatepass"))

    def _old_string(self, raw: bytes) -> None:
        """Push text of Python 2, which torch.load takes for UTF-8; where asked to, for Latin-1."""
        try:
            self._push(raw.decode())
        except UnicodeDecodeError:
            self._push(raw.decode("latin-1"))

    def _quoted(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self.malformed("a STRING without quotes")
        if b"\\" in _ESCAPE.sub(b"", line):
            raise self.malformed("a STRING with an escape that Python 2 does not write")
        self._old_string(line[1:-1].decode("unicode_escape").encode("latin-1"))

    def _container(self, empty: PickleValue) -> None:
        self._containers -= _SET_COSTS if isinstance(empty, set) else 1
        self._require_containers()
        self._push(empty)

    def _require_containers(self) -> None:
        if self._containers < 0:
            raise self.malformed("too many containers for a pickle of its size")

    def _tuple(self, count: int) -> None:
        stack = self._stack
        items = tuple(stack[-count:])
        if len(items) < count:
            raise IndexError
        if MARK in items:
            raise self.malformed("a mark where a value is expected")
        stack[-count:] = (items,)

    def _find_container(self) -> Any:
        """Return the container to add to: not a torch.Size, as equal ones share a record.

        Nor one that the memo has of rows, whose columns would not change, or of equal instances.
        """
        target = self._stack[-1]
        if isinstance(target, Call) and target.function is TORCH_SIZE:
            raise self.malformed("a torch.Size that is changed")
        if self._memo.fixed and id(target) in self._memo.fixed:
            raise self.malformed("one of many instances that is changed")
        return target

    def _extend(self, values: list[PickleValue]) -> None:
        target = self._find_container()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Call):
            target.items.extend(values)
        else:
            raise self.malformed(f"APPEND to {type(target).__name__}")

    def _set_items(self, values: list[Any]) -> None:
        target = self._find_container()
        if len(values) % 2:
            raise self.malformed("a key without a value")
        keys = values[::2]
        pairs = zip(keys, values[1::2], strict=True)
        if isinstance(target, dict):
            self.require_keys(keys)
            target.update(pairs)
        elif isinstance(target, Call):
            target.entries.extend(pairs)
        else:
            raise self.malformed(f"SETITEM on {type(target).__name__}")

    def _dict_from_mark(self) -> None:
        values = self._pop_mark()
        self._push({})
        self._set_items(values)

    def _add_items(self) -> None:
        values = self._pop_mark()
        target = self._find_container()
        if isinstance(target, set):
            target.update(map(self.key, values))
        elif isinstance(target, Call):
            target.items.extend(values)
        else:
            raise self.malformed(f"ADDITEMS to {type(target).__name__}")

    def require_keys(self, keys: list[Any]) -> None:
        """Do the same as ``key`` for many: most are all text, all records, or all integers."""
        kinds = set(map(type, keys))
        if kinds == _TEXT:
            self.charge(sum(map(len, keys)) >> _AT_ONCE)
        elif kinds == _INTEGER:
            self._charge_wide(keys)
            self.charge(_COST * len(keys))
        elif kinds != _RECORD:
            for key in keys:
                self.key(key)

    def key(self, key: PickleValue) -> PickleValue:
        """Return a value that may key a dict; charge the cost of hashing and comparing it.

        Raises Damaged if it is not plain, or not small. A pickle cannot choose the hashes of text
        and records, but can make many numbers collide.
        """
        room = [_LARGEST_KEY]
        self._require_key(key, room, 0)
        cost = _LARGEST_KEY - room[0]
        self.charge(_COST * cost)
        if isinstance(key, tuple):
            self.charge(_COST * cost * self._count_collisions(key))
        return key

    def _count_collisions(self, key: tuple[PickleValue, ...] | int) -> int:
        """Count the other keys of this kind with the same hash, which a pickle can choose."""
        chosen, identity = hash(key), hash(repr(key))
        if identity not in self._tuples:
            self._tuples.add(identity)
            self._collisions[chosen] = self._collisions.get(chosen, -1) + 1
        return self._collisions.get(chosen, 0)

    def _require_key(self, key: Any, room: list[int], depth: int) -> None:
        room[0] -= 1 + (len(key) >> _AT_ONCE if isinstance(key, str | bytes) else 0)
        if isinstance(key, tuple) and depth < 4 and room[0] >= len(key):
            if set(map(type, key)) == _INTEGER:
                self._charge_wide(key)
                room[0] -= len(key)
                return
            for item in key:
                self._require_key(item, room, depth + 1)
        elif isinstance(key, int):
            self._charge_wide((key,))
        elif key is not None and not isinstance(key, str | int | float | bytes | _RECORDS):
            raise self.malformed(f"a {type(key).__name__} as a key")

    def _charge_wide(self, keys: Sequence[int]) -> None:
        """Charge integers of more than 64 bits, of which a pickle can make any number collide."""
        if max(keys) > _WIDEST_KEY or min(keys) < -_WIDEST_KEY:
            for key in keys:
                if abs(key) > _WIDEST_KEY:
                    self.charge(
                        _COST * self._count_collisions(key) + (key.bit_length() >> _AT_ONCE)
                    )

    def _build(self) -> None:
        state = self._pop()
        target = self._find_container()
        if not isinstance(target, Call | OrderedMapping):
            raise self.malformed(f"BUILD on {type(target).__name__}")
        target.state = state

    def charge(self, count: int) -> None:
        """Count what is built; Damaged if that is out of all proportion to the pickle."""
        self._budget -= count
        if self._budget < 0:
            raise self.malformed("too many values for a pickle of its size")

    def _get(self, index: int) -> None:
        try:
            value = self._memo[index]
        except LookupError:
            raise self.malformed(f"memo {index} was never set") from None
        self._push(value)

    def _put(self, index: int) -> None:
        self._memo.put(index, self._top())

    def _memoize(self) -> None:
        self._memo.put(len(self._memo), self._top())
