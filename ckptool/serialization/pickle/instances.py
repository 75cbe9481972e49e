"""Records that a pickle repeats thousands of times, each read at once.

A class instance with a state is some twenty opcodes, the same for every instance except for its
fields' values. If those are plain (integers, short text, sizes, memo entries), the second instance
of a class becomes a regular expression that finds the third and all further ones. A field may
contain a list of a few such instances, or an object whose state is a tuple of plain values: the
metadata of a tensor in few chunks is one match. Of those that are equal, byte for byte, as tensors
of one shape have them, one is made. Stack and memo become what the individual opcodes would have
made of them; whatever does not match is left to the opcodes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from msgspec import Struct

from ckptool.serialization.pickle import row_reader
from ckptool.serialization.pickle.memo import Memo
from ckptool.serialization.pickle.records import TORCH_SIZE, Call, Global
from ckptool.serialization.pickle.row_reader import PLAIN, RowReader
from ckptool.serialization.pickle.rows import RowClass, RowRun

_REFERENCE = rb"(?:h.|j.{4})"
_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x04.{4}|\x07.{7}|\x08.{8}))"
_TEXT = rb"\x8c.[ -~]{0,255}\x94"
_SIZES = rb"(?:" + _INTEGER + rb"{1,3}[\x85-\x87]|\(" + _INTEGER + rb"{4,64}t)\x94\x85\x94R\x94"
_VALUE = rb"|".join([_REFERENCE + _SIZES, _REFERENCE, _INTEGER, rb"[N\x88\x89]", _TEXT])
_NEW = rb"\)\x81\x94"
"""EMPTY_TUPLE, NEWOBJ, MEMOIZE."""
_BEGIN = _NEW + rb"\}\x94\("
"""The same with EMPTY_DICT, MEMOIZE, MARK."""
_END = rb"ub"
"""SETITEMS, BUILD."""
_MOST_FIELDS = 16
_FIELDS = rb"(?:%b(?:%%b)){1,%d}" % (_REFERENCE, _MOST_FIELDS)
_ITEM = rb"(?:%b|%b|[N\x88\x89])" % (_REFERENCE, _INTEGER)
_STATE = rb"\((?:%b){1,%d}t\x94" % (_ITEM, _MOST_FIELDS)
"""A tuple of plain values, from MARK to MEMOIZE."""
_MADE = _REFERENCE + _NEW + _STATE + b"b"
_FLAT = _REFERENCE + _BEGIN + _FIELDS % _VALUE + _END
_MOST_LISTED = 16
_LIST = rb"(?:%%ba|\((?:%%b){2,%d}+e)" % _MOST_LISTED
"""An instance, APPEND; or MARK, some, APPENDS."""
_LISTED = rb"\]\x94" + _LIST % (_FLAT, _FLAT)
"""EMPTY_LIST, MEMOIZE, and what is in it."""
_NESTED = b"|".join([_MADE, _LISTED, _VALUE])
_INSTANCE = b"(%b)%b(%b)%b" % (_REFERENCE, _BEGIN, _FIELDS % _NESTED, _END)
_FIELD = b"(%b)(%b)" % (_REFERENCE, _NESTED)
_MOST_PATTERNS = 64
"""Classes, of which each costs an expression: to compile one takes longer than many opcodes."""
_MOST_VALUES = 1 << 14
"""Values that are kept, for when they come again."""
_MOST_EQUAL = 1 << 8
"""Instances that are kept for others that are equal."""
_LONGEST_WAIT = 63
"""Attempts that are skipped, at most, after one that found few rows."""
_FAR = 1 << 22
_WORTH_NUMPY = 1 << 11
"""So many rows within so many bytes are read as columns, which needs numpy.

Also if it is there: else a plan is another in a program that has imported it.
"""
_KEY = 5
"""Bytes that identify a class: LONG_BINGET and its number, or BINGET's with EMPTY_TUPLE, NEWOBJ."""
_SHORT, _TUPLE, _SHORT_TEXT = ord("h"), ord("t"), 0x8C
_MARK, _EMPTY_LIST = ord("("), ord("]")
_INTEGERS = {ord("K"): (1, False), ord("M"): (1, False), ord("J"): (1, True), 0x8A: (2, True)}
"""The offset of an integer's bytes, and whether they are signed."""


def _any(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)  # compiled when first used, and kept by re


class _InstancePattern(Struct, frozen=True):
    """The instances of one class: an expression that matches one, with a group for each value.

    ``fields`` are its names, each with the pattern of the instances in a list there, the class of
    an object there, or None; ``lists`` are the indices of those with a list. Only a flat one, where
    all are None, can be a row.
    """

    expression: re.Pattern[bytes]
    rows: RowClass
    fields: tuple[tuple[str, _InstancePattern | Global | None], ...]
    lists: tuple[int, ...]
    is_flat: bool


class _Instance(Struct, frozen=True):
    """An instance, what it added to the memo, and the number of its dicts and lists."""

    record: Call
    noted: list[Any]
    containers: int


class InstanceReader:
    """Reads consecutive instances from ``data``, onto a machine's stack and memo."""

    def __init__(self, data: bytes, stack: list[Any], memo: Memo) -> None:
        self._data = data
        self._stack = stack
        self._memo = memo
        self._patterns: dict[bytes, _InstancePattern] = {}
        self._listed: dict[bytes, _InstancePattern] = {}
        self._instances: dict[bytes, _Instance] = {}
        self._values = _Values(memo, self._listed)
        self._patterns_left = _MOST_PATTERNS
        self._changes = 0
        self._row_reader: RowReader | None = None
        self._attempts = self._waits = 0

    def read_rows(
        self, pos: int, frame_end: int, *, is_dict: bool
    ) -> tuple[list[RowRun], int, int] | None:
        """Read the many instances from ``pos`` to the end of a batch as columns; None if few are.

        They are items of a list, or keys and values of a dict. Returns the offset after them and
        the end of the frame there, too. After an attempt that finds few, attempts are skipped, more
        of them each time.
        """
        self._attempts += 1
        if self._attempts <= self._waits or self._memo.sparse:
            return None
        self._forget_changes()
        classes = self._find_classes(pos, 1 + is_dict)
        if not classes:
            return None
        start = classes[0].reference + row_reader.BEGIN
        rows = None
        if self._row_reader or self._data.count(start, pos, pos + _FAR) >= _WORTH_NUMPY:
            self._row_reader = self._row_reader or RowReader(self._data, self._memo)
            rows = self._row_reader.read(pos, frame_end, classes)
        self._attempts = 0
        self._waits = 0 if rows else min(_LONGEST_WAIT, 2 * self._waits + 1)
        return rows

    def _find_classes(self, pos: int, count: int) -> list[RowClass]:
        """Return the distinct classes of so many instances, from ``pos`` on; none if one is odd."""
        classes: list[RowClass] = []
        for _ in range(count):
            pattern = self._patterns.get(self._data[pos : pos + _KEY])
            match = pattern.expression.match(self._data, pos) if pattern else None
            if match is None and self._add_pattern(pos):
                pattern = self._patterns[self._data[pos : pos + _KEY]]
                match = pattern.expression.match(self._data, pos)
            if pattern is None or match is None or not pattern.is_flat or pattern.rows in classes:
                return []
            classes.append(pattern.rows)
            pos = match.end()
        return classes

    def read(self, pos: int, end: int, most: int) -> tuple[int, int]:
        """Read up to ``most`` instances that are between ``pos`` and ``end``.

        Returns the offset after them, and the number of their dicts and lists.
        """
        data, patterns, stack = self._data, self._patterns, self._stack
        depth, containers = len(stack), 0
        self._forget_changes()
        while pos < end and not self._memo.sparse and len(stack) - depth < most:
            pattern = patterns.get(data[pos : pos + _KEY])
            match = pattern.expression.match(data, pos, end) if pattern else None
            if pattern is None or match is None:
                if not self._add_pattern(pos, end):
                    break
                continue
            instance = self._instances.get(match[0])
            if instance is not None:
                self._memo.dense += instance.noted
            elif (instance := self._make(pattern, match)) is None:
                break
            stack.append(instance.record)
            containers += instance.containers
            pos = match.end()
        return pos, containers

    def _make(self, pattern: _InstancePattern, match: re.Match[bytes]) -> _Instance | None:
        """Make a matched instance, and note its content; None, and nothing noted, if it is odd.

        An instance with a list is kept for equal ones; many similar ones without lists are rows.
        """
        values, memo, pieces = self._values, self._memo, match.groups()
        if len(values) > _MOST_VALUES:
            values.forget()
        try:
            for piece in pieces:
                values[piece]
        except LookupError:
            return None
        begin = len(memo.dense)
        record = self._build(pattern, pieces)
        containers = 1 + sum(1 + len(values[pieces[at]]) for at in pattern.lists)
        instance = _Instance(record, memo.dense[begin:], containers)
        if pattern.lists and len(self._instances) < _MOST_EQUAL:
            self._instances[match[0]] = instance
            memo.fixed |= {id(entry): entry for entry in instance.noted}
        return instance

    def _build(self, pattern: _InstancePattern, pieces: Iterable[bytes]) -> Call:
        """Return an instance from its known pieces; note it and its content."""
        note, values, noted = self._memo.dense, self._values, self._values.noted
        state: dict[str, Any] = {}
        record = Call(pattern.rows.function, (), True, state)
        note += record, state
        for (name, inner), piece in zip(pattern.fields, pieces, strict=True):
            value = values[piece]
            if isinstance(inner, _InstancePattern):
                state[name] = listed = list[Any]()
                note.append(listed)
                listed += [self._build(inner, item) for item in value]
                continue
            if inner is not None:
                note.append(value := Call(inner, (), True, value))
            state[name] = value
            if piece in noted:
                note += noted[piece]
        return record

    def _add_pattern(self, pos: int, end: int = sys.maxsize) -> bool:
        """Use the instance at ``pos`` as its class's pattern; False if none ends by ``end``."""
        match = _any(_INSTANCE).match(self._data, pos, end) if self._patterns_left else None
        if match is None:
            return False
        self._patterns_left -= 1
        try:
            pattern = self._pattern_of(match)
        except LookupError:
            return False
        self._patterns[self._data[pos : pos + _KEY]] = pattern
        return True

    def _pattern_of(self, match: re.Match[bytes]) -> _InstancePattern:
        """Return the pattern of an instance; LookupError if there can be none."""
        reference, fields = match[1], _any(_FIELD).findall(match[2])
        names = tuple(self._values[item] for item, _ in fields)
        if not all(type(name) is str for name in names) or len({*names}) < len(names):
            raise LookupError
        inner: list[_InstancePattern | Global | None] = []
        parts = [re.escape(reference), _BEGIN]
        for item, sample in fields:
            pattern, expression = self._field_pattern(sample)
            inner.append(pattern)
            parts += re.escape(item), expression
        of_rows = RowClass(self._class_at(reference), names, reference, tuple(i for i, _ in fields))
        found_by = re.compile(b"".join([*parts, _END]), re.DOTALL)
        pairs = tuple(zip(names, inner, strict=True))
        lists = tuple(n for n, kind in enumerate(inner) if isinstance(kind, _InstancePattern))
        return _InstancePattern(found_by, of_rows, pairs, lists, not any(inner))

    def _field_pattern(self, sample: bytes) -> tuple[_InstancePattern | Global | None, bytes]:
        """Return the kind of a field that is not a plain value, and the expression for it."""
        begin = 3 if sample[2:3] == b"(" else 2
        if sample[0] == _EMPTY_LIST and (match := _any(_INSTANCE).match(sample, begin)):
            pattern = self._pattern_of(match)
            self._listed[sample[begin : begin + _KEY]] = pattern
            instance = pattern.expression.pattern.replace(b"(%b)" % _VALUE, b"(?:%b)" % _VALUE)
            return pattern, rb"(\]\x94%b)" % (_LIST % (instance, instance))
        if _any(_MADE).fullmatch(sample):
            reference = sample[: 2 if sample[0] == _SHORT else 5]
            return self._class_at(reference), b"%b%b(%b)b" % (re.escape(reference), _NEW, _STATE)
        return None, b"(%b)" % _VALUE

    def _class_at(self, reference: bytes) -> Global:
        """Return the class that a reference means; LookupError if it means another value."""
        function = self._values[reference]
        if type(function) is not Global or function.name == "getattr" or function is TORCH_SIZE:
            raise LookupError
        return function

    def _forget_changes(self) -> None:
        """Drop everything read from the memo if its entries have changed."""
        if self._changes != self._memo.changes:
            self._changes = self._memo.changes
            self._patterns.clear()
            self._listed.clear()
            self._instances.clear()
            self._values.forget()
            if self._row_reader is not None:
                self._row_reader.forget()


class _Values(dict[bytes, Any]):
    """The values that opcodes make; LookupError if they make none.

    For a list of instances, of a class that is ``listed``, they are the pieces of each: lists can
    change. ``noted`` is what some of them add to the memo, including the value itself.
    """

    def __init__(self, memo: Memo, listed: Mapping[bytes, _InstancePattern]) -> None:
        self._memo = memo
        self._listed = listed
        self.noted: dict[bytes, tuple[Any, ...]] = {}

    def __missing__(self, piece: bytes) -> Any:
        self[piece] = value = self._read(piece)
        return value

    def forget(self) -> None:
        """Drop all values; they are made again from their opcodes."""
        self.clear()
        self.noted.clear()

    def _read(self, piece: bytes) -> Any:
        kind = piece[0]
        if kind in _INTEGERS:
            return _integer(piece)
        if kind == _MARK:
            return self._tuple(piece)
        if kind == _EMPTY_LIST:
            return self._split(piece)
        if kind in PLAIN:
            return PLAIN[kind]
        if kind == _SHORT_TEXT:
            return self._text(piece)
        begin = 2 if kind == _SHORT else 5
        value = self._memo[int.from_bytes(piece[1:begin], "little")]
        return self._sizes(value, piece, piece[begin:-5]) if len(piece) > begin else value

    def _text(self, piece: bytes) -> str:
        if len(piece) != piece[1] + 3:
            raise LookupError
        text = piece[2:-1].decode("ascii")
        self.noted[piece] = (text,)
        return text

    def _tuple(self, piece: bytes) -> tuple[Any, ...]:
        state = tuple(self[item] for item in _any(_ITEM).findall(piece, 1, len(piece) - 2))
        self.noted[piece] = (state,)
        return state

    def _split(self, piece: bytes) -> list[tuple[bytes, ...]]:
        """Return the pieces of each instance in a list; LookupError if one is not an instance."""
        begin = 3 if piece[2] == _MARK else 2
        expression = self._listed[piece[begin : begin + _KEY]].expression
        matches = list(expression.finditer(piece, begin))
        if sum(match.end() - match.start() for match in matches) != len(piece) - begin - 1:
            raise LookupError
        instances = [match.groups() for match in matches]
        for inner in chain.from_iterable(instances):
            self[inner]
        return instances

    def _sizes(self, function: Any, piece: bytes, written: bytes) -> Call:
        sizes = tuple(map(_integer, _any(_INTEGER).findall(written)))
        if function is not TORCH_SIZE or written[-1] not in (_TUPLE, 0x84 + len(sizes)):
            raise LookupError
        call = Call(TORCH_SIZE, (sizes,))
        self.noted[piece] = (sizes, call.args, call)
        return call


def _integer(piece: bytes) -> int:
    begin, signed = _INTEGERS[piece[0]]
    return int.from_bytes(piece[begin:], "little", signed=signed)
