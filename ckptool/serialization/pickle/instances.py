"""Records that a pickle repeats by the thousand, each read at once.

A class instance with a state is some twenty opcodes, the same for every instance but for what its
fields hold. Where those are plain (integers, short text, sizes, what the memo has), the second
instance of a class becomes a regular expression that finds the third and all further ones. Stack
and memo become what the opcodes one by one would make of them; what does not fit is left to them.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from typing import Any, NamedTuple

from ckptool.serialization.pickle import row_reader
from ckptool.serialization.pickle.records import TORCH_SIZE, Call, Global
from ckptool.serialization.pickle.row_reader import RowReader
from ckptool.serialization.pickle.rows import RowClass, Run


class Memo:
    """What a pickle has noted, by number: ``dense`` from 0 on, ``sparse`` what comes behind a gap.

    What runs of rows note is made when it is asked for: ``hidden`` is how much that is. Numbers
    below ``plain`` are places in ``dense``; ``made`` is what was asked for, by its id. ``changes``
    counts how often a number was given to something else.
    """

    def __init__(self) -> None:
        self.dense: list[Any] = []
        self.sparse: dict[int, Any] = {}
        self.changes = 0
        self.hidden = 0
        self.plain = sys.maxsize
        self.made: dict[int, Any] = {}
        self._firsts: list[int] = []
        self._runs: list[tuple[int, Run]] = []

    def __len__(self) -> int:
        return len(self.dense) + len(self.sparse) + self.hidden

    def __getitem__(self, index: int) -> Any:
        """Return what has this number; LookupError where nothing has."""
        if index < self.plain:
            return self.dense[index] if 0 <= index < len(self.dense) else self.sparse[index]
        at = bisect_right(self._firsts, index) - 1
        after, run = self._runs[at]
        if index < self._firsts[at] + run.noted:
            value = run[index - self._firsts[at]]
            self.made[id(value)] = value
            return value
        return self.dense[index - after] if index < self.next_number else self.sparse[index]

    @property
    def next_number(self) -> int:
        """The number under which the next value is noted."""
        return len(self.dense) + self.hidden

    def add_run(self, run: Run) -> None:
        """Note all that a run of rows does."""
        first = self.next_number
        self.plain = min(self.plain, first)
        self.hidden += run.noted
        self._firsts.append(first)
        self._runs.append((self.hidden, run))

    def put(self, index: int, value: Any) -> None:
        """Note a value under this number; ValueError where it is none, or a row's."""
        if index < 0 or self.plain <= index < self.next_number:
            raise ValueError(index)
        if index < self.next_number:
            self.dense[index] = value
            self.changes += 1
        elif index == self.next_number:
            self.sparse.pop(index, None)
            self.dense.append(value)
        else:
            self.sparse[index] = value


_REFERENCE = rb"(?:h.|j.{4})"
_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x04.{4}|\x07.{7}|\x08.{8}))"
_TEXT = rb"\x8c.[ -~]{0,255}\x94"
_SIZES = rb"(?:" + _INTEGER + rb"{1,3}[\x85-\x87]|\(" + _INTEGER + rb"{4,64}t)\x94\x85\x94R\x94"
_VALUE = rb"|".join([_REFERENCE + _SIZES, _REFERENCE, _INTEGER, rb"[N\x88\x89]", _TEXT])
_BEGIN = rb"\)\x81\x94\}\x94\("
"""EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK."""
_END = rb"ub"
"""SETITEMS, BUILD."""
_FIELD = rb"(%b)(?:%b)" % (_REFERENCE, _VALUE)
_MOST_FIELDS = 16
_INSTANCE = b"(%b)%b((?:%b){1,%d})%b" % (_REFERENCE, _BEGIN, _FIELD, _MOST_FIELDS, _END)
_ANY_INSTANCE = re.compile(_INSTANCE, re.DOTALL)
_ANY_FIELD = re.compile(_FIELD, re.DOTALL)
_ANY_INTEGER = re.compile(_INTEGER, re.DOTALL)
_MOST_PATTERNS = 64
_MOST_VALUES = 1 << 14
_LONGEST_WAIT = 63
_FAR = 1 << 16
"""Bytes within which many rows are, so that numpy is worth its start."""
_KEY = 5
"""Bytes that tell a class: LONG_BINGET and its number, or BINGET's with EMPTY_TUPLE, NEWOBJ."""
_SHORT, _TUPLE, _SHORT_TEXT = ord("h"), ord("t"), 0x8C
_PLAIN = {ord("N"): None, 0x88: True, 0x89: False}
_INTEGERS = {ord("K"): (1, False), ord("M"): (1, False), ord("J"): (1, True), 0x8A: (2, True)}
"""Where the bytes of an integer begin, and whether they are signed."""


class _InstancePattern(NamedTuple):
    """The instances of one class: what finds one, and the names of its fields."""

    expression: re.Pattern[bytes]
    rows: RowClass

    @property
    def function(self) -> Global:
        return self.rows.function

    @property
    def names(self) -> tuple[str, ...]:
        return self.rows.names


class InstanceReader:
    """Reads instances in a row out of ``data``, onto a machine's stack and memo."""

    def __init__(self, data: bytes, stack: list[Any], memo: Memo) -> None:
        self._data = data
        self._stack = stack
        self._memo = memo
        self._patterns: dict[bytes, _InstancePattern] = {}
        self._values = _Values(memo)
        self._patterns_left = _MOST_PATTERNS
        self._changes = 0
        self._row_reader: RowReader | None = None
        self._attempts = self._waits = 0

    def read_rows(self, pos: int, end: int, *, is_key: bool) -> int:
        """Read many instances from ``pos`` to ``end`` as columns; return the offset after them.

        Those of two classes only where the first ``is_key`` of the second. After an attempt that
        finds few the next ones are left out, more of them each time.
        """
        self._attempts += 1
        if self._attempts <= self._waits or self._memo.sparse:
            return pos
        self._forget_changes()
        classes = self._find_classes(pos)
        if not classes or (len(classes) > 1 and not is_key):
            return pos
        if self._row_reader is None:
            start = classes[0].reference + row_reader.BEGIN
            if self._data.count(start, pos, min(end, pos + _FAR)) < row_reader.LEAST:
                return pos
            self._row_reader = RowReader(self._data, self._memo.__getitem__)
        run = self._row_reader.read(pos, end, classes, self._memo.next_number)
        self._attempts = 0
        if run is None:
            self._waits = min(_LONGEST_WAIT, 2 * self._waits + 1)
            return pos
        self._waits = 0
        self._memo.add_run(run)
        self._stack += run.rows
        return pos + run.nbytes

    def _find_classes(self, pos: int) -> tuple[RowClass, ...]:
        """Return the class of the instances from ``pos`` on, or the two that take turns."""
        classes: list[RowClass] = []
        for _ in range(3):
            pattern = self._patterns.get(self._data[pos : pos + _KEY])
            match = pattern.expression.match(self._data, pos) if pattern else None
            if pattern is None or match is None:
                if not self._add_pattern(pos):
                    return ()
                pattern = self._patterns[self._data[pos : pos + _KEY]]
                match = pattern.expression.match(self._data, pos)
            if match is None:
                return ()
            if classes and pattern.rows is classes[0]:
                return tuple(classes)
            classes.append(pattern.rows)
            pos = match.end()
        return ()

    def read(self, pos: int, end: int, most: int) -> tuple[int, int]:
        """Read up to ``most`` instances that begin from ``pos`` to ``end``.

        Returns the offset after them, and how many they are.
        """
        data, patterns, note, stack = self._data, self._patterns, self._memo.dense, self._stack
        values = self._values
        value_of, noted = values.__getitem__, values.noted
        before = len(stack)
        self._forget_changes()
        while pos < end and not self._memo.sparse and len(stack) - before < most:
            pattern = patterns.get(data[pos : pos + _KEY])
            match = pattern.expression.match(data, pos) if pattern else None
            if pattern is None or match is None:
                if not self._add_pattern(pos):
                    break
                continue
            pieces = match.groups()
            if len(values) > _MOST_VALUES:
                values.forget()
            try:
                state = dict(zip(pattern.names, map(value_of, pieces)))  # noqa: B905 (a third faster)
            except LookupError:
                break
            record = Call(pattern.function, (), True, state)
            note += record, state
            for piece in pieces:
                if piece in noted:
                    note += noted[piece]
            stack.append(record)
            pos = match.end()
        return pos, len(stack) - before

    def _add_pattern(self, pos: int) -> bool:
        """Take the instance at ``pos`` as the pattern of its class; False where there is none."""
        match = _ANY_INSTANCE.match(self._data, pos) if self._patterns_left else None
        if match is None:
            return False
        self._patterns_left -= 1
        reference, references = match[1], _ANY_FIELD.findall(match[2])
        try:
            function, *names = (self._values[item] for item in (reference, *references))
        except LookupError:
            return False
        if type(function) is not Global or function.name == "getattr":
            return False
        if not all(type(name) is str for name in names) or len({*names}) < len(names):
            return False
        fields = b"".join(b"%b(%b)" % (re.escape(item), _VALUE) for item in references)
        expression = re.compile(re.escape(reference) + _BEGIN + fields + _END, re.DOTALL)
        of_rows = RowClass(function, tuple(names), reference, tuple(references))
        pattern = _InstancePattern(expression, of_rows)
        self._patterns[self._data[pos : pos + _KEY]] = pattern
        return True

    def _forget_changes(self) -> None:
        """Forget all that was read of the memo where its entries have changed."""
        if self._changes != self._memo.changes:
            self._changes = self._memo.changes
            self._patterns.clear()
            self._values.forget()
            if self._row_reader is not None:
                self._row_reader.forget()


class _Values(dict[bytes, Any]):
    """The values that opcodes make; LookupError where they make none.

    ``noted`` is what some of them put into the memo, with the value itself.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self.noted: dict[bytes, tuple[Any, ...]] = {}

    def __missing__(self, piece: bytes) -> Any:
        self[piece] = value = self._read(piece)
        return value

    def forget(self) -> None:
        """Drop all values, which are made anew from their opcodes."""
        self.clear()
        self.noted.clear()

    def _read(self, piece: bytes) -> Any:
        kind = piece[0]
        if kind in _INTEGERS:
            return _integer(piece)
        if kind in _PLAIN:
            return _PLAIN[kind]
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

    def _sizes(self, function: Any, piece: bytes, written: bytes) -> Call:
        sizes = tuple(map(_integer, _ANY_INTEGER.findall(written)))
        if function is not TORCH_SIZE or written[-1] not in (_TUPLE, 0x84 + len(sizes)):
            raise LookupError
        call = Call(TORCH_SIZE, (sizes,))
        self.noted[piece] = (sizes, call.args, call)
        return call


def _integer(piece: bytes) -> int:
    begin, signed = _INTEGERS[piece[0]]
    return int.from_bytes(piece[begin:], "little", signed=signed)
