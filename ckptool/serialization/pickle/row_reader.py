"""Instances that a pickle repeats thousands of times, read into columns.

A metadata pickle of a million chunks is a million instances of the same three classes, in batches
of a thousand. Possible beginnings of instances are searched for; then each field is read for all of
them at once. One counts only if its opcodes end just where the next begins, so by induction all are
what the machine would have read one by one. Whatever does not match is left to the machine.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ckptool.core.box import distinct
from ckptool.serialization.pickle.records import TORCH_SIZE, RowObjects
from ckptool.serialization.pickle.rows import (
    INTEGER,
    OBJECT,
    TEXT,
    Column,
    RowClass,
    Rows,
    Run,
    count_notes,
    count_of_kinds,
)

LEAST, _MOST = 64, 1024
_MOST_DIMS = 8
_MOST_KNOWN, _LARGEST_KNOWN = 32, 1 << 16
_PADDING = 16
BEGIN = b")\x81\x94}\x94("
"""EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK."""
_SHORT_TEXT, _LONG1, _MEMOIZE = 0x8C, 0x8A, 0x94
_PLAIN = {ord("N"): None, 0x88: True, 0x89: False}
_SIZE_END = b"\x85\x94R\x94"
"""TUPLE1, MEMOIZE, REDUCE, MEMOIZE."""


class _KnownRun(NamedTuple):
    """Rows that were read from ``data`` and end there; they have no text of their own."""

    data: bytes
    classes: Sequence[RowClass]
    table: list[list[Column]]


class RowReader:
    """Reads rows from ``data``; ``value_of`` returns the memo entry of a number.

    ``data`` must have more than a few bytes.
    """

    def __init__(self, data: bytes, value_of: Callable[[int], Any]) -> None:
        import numpy as np

        self._data = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._last = len(data) - _PADDING
        self._words: Any = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        self._value_of = value_of
        self._objects = RowObjects()
        self._codes: dict[int, int] = {}
        self._texts: dict[bytes, int] = {}
        self._known: deque[_KnownRun] = deque(maxlen=_MOST_KNOWN)
        self._lengths, self._signs = np.zeros(256, np.int64), np.zeros(256, np.int64)
        self._lengths[list(b"KMJ")] = 1, 2, 4
        self._signs[ord("J")] = 1 << 31
        self._masks = np.array([(1 << 8 * length) - 1 for length in range(9)], np.uint64)
        self._begins_size = np.isin(np.arange(256), list(b"KMJ\x8a()"))

    def forget(self) -> None:
        """Drop memo entries, some of which have changed."""
        self._codes.clear()
        self._known.clear()

    def read(self, pos: int, end: int, classes: Sequence[RowClass], noted: int) -> Run | None:
        """Read rows of alternating classes from ``pos`` on; None if they are few.

        ``noted`` is the number of the next memo entry. Rows that begin after ``end`` are skipped.
        """
        import numpy as np

        begin = classes[0].reference + BEGIN
        for known in self._known:
            if known.classes == classes and self._is_repeated(known, begin, pos, end):
                return self._run(known.classes, known.table, pos, len(known.data))
        found = re.compile(re.escape(begin)).finditer(self._data, pos, min(end, self._last))
        starts = np.array(list(map(re.Match.start, islice(found, _MOST))), np.int64)
        if len(starts) < LEAST or starts[0] != pos:
            return None
        good = np.ones(len(starts), bool)
        cursor = starts
        table: list[list[Column]] = []
        for each in classes:
            columns = []
            expected = each.reference + BEGIN
            for field in each.fields:
                cursor = self._literal(cursor, expected + field, good)
                column, cursor = self._field(cursor, good)
                columns.append(column)
                expected = b""
            cursor = self._literal(cursor, b"ub", good)
            table.append(columns)
        good[1:] &= cursor[:-1] == starts[1:]
        count = _first_false(good)
        while count >= LEAST:
            table = [[Column(k[:count], n[:count]) for k, n in columns] for columns in table]
            count = self._resolve(table, noted)
            if count == len(table[0][0].kinds):
                behind = int(cursor[count - 1])
                if behind - pos <= _LARGEST_KNOWN and not self._data.startswith(begin, behind):
                    self._keep(_KnownRun(self._data[pos:behind], classes, table))
                return self._run(classes, table, pos, behind - pos)
        return None

    def _run(
        self, classes: Sequence[RowClass], table: list[list[Column]], pos: int, nbytes: int
    ) -> Run:
        pairs = zip(classes, table, strict=True)
        return Run(tuple(Rows(each, cols, self._objects, pos) for each, cols in pairs), nbytes)

    def _keep(self, known: _KnownRun) -> None:
        """Keep rows that may be repeated: the chunks of the next tensor, which is cut alike."""
        if not any((kinds == TEXT).any() for columns in known.table for kinds, _ in columns):
            self._known.appendleft(known)

    def _is_repeated(self, known: _KnownRun, begin: bytes, pos: int, end: int) -> bool:
        """Return whether the same rows come again, and no other after them."""
        behind = pos + len(known.data)
        is_within = behind <= min(end, self._last)
        is_same = is_within and self._data.startswith(known.data, pos)
        return is_same and not self._data.startswith(begin, behind)

    def _literal(self, at: Any, opcodes: bytes, good: Any) -> Any:
        """Return the offsets after opcodes that are the same in all rows."""
        for begin in range(0, len(opcodes), 8):
            some = opcodes[begin : begin + 8]
            words = self._words[at + begin] & self._masks[len(some)]
            good &= words == int.from_bytes(some, "little")
        return self._within(at + len(opcodes), good)

    def _within(self, at: Any, good: Any) -> Any:
        """Return offsets from which opcodes can be read; too long rows are invalid."""
        if at.max() > self._last:
            good &= at <= self._last
            return at.clip(max=self._last)
        return at

    def _field(self, at: Any, good: Any) -> tuple[Column, Any]:
        """Read a value of each row; return the offsets after them, too.

        Valid are those of the first one's kind: integers, plain ones, sizes, or else memo entries
        and text.
        """
        import numpy as np

        opcodes = self._bytes[at]
        first = int(opcodes[0])
        if self._lengths[first] or first == _LONG1:
            numbers, end = self._integers(at, opcodes)
            good &= end > at
            return Column(np.full(len(at), INTEGER, np.int8), numbers[:, None]), end
        kinds = np.full(len(at), OBJECT, np.int8)
        if first in _PLAIN:
            good &= opcodes == first
            return Column(kinds, np.full((len(at), 1), -first)), at + 1
        wide = opcodes == ord("j")
        numbers = (self._words[at + 1] & self._masks[np.where(wide, 4, 1)]).view(np.int64)
        end = at + np.where(wide, 5, 2)
        others = ~wide & (opcodes != ord("h"))
        if others.any():
            is_text = opcodes == _SHORT_TEXT
            good &= is_text >= others
            kinds[is_text] = TEXT
            end = self._within(np.where(is_text, end + numbers + 1, end), good)
            good &= ~is_text | (self._bytes[end - 1] == _MEMOIZE)
            numbers = np.where(is_text, at, numbers)
        end = self._within(end, good)
        column = Column(kinds, numbers[:, None])
        is_size = self._begins_size[int(self._bytes[end[0]])] and kinds[0] == OBJECT
        return self._sizes(end, column, good) if is_size else (column, end)

    def _integers(self, at: Any, opcodes: Any) -> tuple[Any, Any]:
        """Read integers; the end of an invalid one is its beginning."""
        import numpy as np

        lengths, signs = self._lengths[opcodes], self._signs[opcodes]
        begin = at + 1
        is_long = opcodes == _LONG1
        if is_long.any():
            written = self._bytes[begin].astype(np.int64)
            is_long &= (written >= 4) & (written <= 8)
            lengths = np.where(is_long, written, lengths)
            signs = np.where(is_long, np.int64(1) << (8 * written - 1) % 64, signs)
            begin = begin + is_long
        numbers = (self._words[begin] & self._masks[lengths]).view(np.int64)
        return (numbers ^ signs) - signs, np.where(lengths > 0, begin + lengths, at)

    def _sizes(self, begin: Any, column: Column, good: Any) -> tuple[Column, Any]:
        """Read what follows references as the sizes of a ``torch.Size``."""
        import numpy as np

        good &= column.kinds == OBJECT
        references = distinct(column.numbers[good, 0]).tolist()
        if any(self._value(reference) is not TORCH_SIZE for reference in references):
            good[:] = False
        opcodes = self._bytes[begin]
        has_mark = opcodes == ord("(")
        cursor, dims = begin + has_mark, np.zeros(len(begin), np.int64)
        sizes = []
        going = np.ones(len(begin), bool)
        for _ in range(_MOST_DIMS):
            values, end = self._integers(cursor, self._bytes[cursor])
            going &= end > cursor
            if not going.any():
                break
            sizes.append(values if going.all() else np.where(going, values, 0))
            dims += going
            cursor = self._within(np.where(going, end, cursor), good)
        closing = np.where(has_mark, ord("t"), np.where(dims > 0, 0x84 + dims, ord(")")))
        good &= (self._bytes[cursor] == closing) & (has_mark == (dims > 3))
        cursor = self._within(cursor + 1, good)
        good &= (dims == 0) | (self._bytes[cursor] == _MEMOIZE)
        after = self._literal(cursor + (dims > 0), _SIZE_END, good)
        table = np.stack(sizes, axis=1) if sizes else np.zeros((len(begin), 1), np.int64)
        return Column(dims.astype(np.int8), table), after

    def _resolve(self, table: list[list[Column]], noted: int) -> int:
        """Replace references and text with codes, in all columns; return how many rows are valid.

        If some refer to unknown entries, the columns stay unchanged.
        """
        import numpy as np

        counts = np.stack([count_notes(columns) for columns in table], axis=1)
        begins = (noted + np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        texts: dict[int, int] = {}
        for columns, begin in zip(table, begins.T, strict=True):
            at = begin + 2
            for kinds, numbers in columns:
                is_text = kinds == TEXT
                if is_text.any():
                    codes = list(map(self._text, numbers[is_text, 0].tolist()))
                    texts |= zip(at[is_text].tolist(), codes, strict=True)
                at = at + count_of_kinds(kinds)
        done: list[list[Column]] = [[] for _ in table]
        for each, columns, begin in zip(done, table, begins.T, strict=True):
            at = begin + 2
            for column in columns:
                resolved = column
                if column.kinds[0] in (OBJECT, TEXT):
                    resolved, holds = self._resolve_column(column, noted, begin, at, texts)
                    if not holds.all():
                        return _first_false(holds)
                numbers = resolved.numbers[:, : max(1, int(column.kinds.max()))]
                each.append(Column(resolved.kinds.copy(), _narrow(numbers)))
                at = at + count_of_kinds(column.kinds)
        table[:] = done
        return len(counts)

    def _resolve_column(
        self, column: Column, noted: int, begin: Any, at: Any, texts: dict[int, int]
    ) -> tuple[Column, Any]:
        """Return a column of codes, and which rows are known.

        Rows begin their memo entries at ``begin``, the column's text at ``at``; ``texts`` are codes
        of those of the run, by number. A row can refer to an earlier one's entry.
        """
        import numpy as np

        kinds, numbers = column
        is_text = kinds == TEXT
        references = np.where(is_text, at, numbers[:, 0])
        unique, inverse = np.unique(references, return_inverse=True)
        codes = [texts.get(n) if n >= noted else self._code(n) for n in unique.tolist()]
        known = np.array([-1 if code is None else code for code in codes], np.int64)[inverse]
        holds = (known >= 0) & (is_text | (references < noted) | (references < begin))
        return Column(kinds, known[:, None]), holds

    def _value(self, reference: int) -> Any:
        """Return the memo entry of a number, and for an opcode's negative what it pushes."""
        code = self._code(reference)
        return None if code is None else self._objects[code]

    def _code(self, reference: int) -> int | None:
        """Return the index among the objects of a memo entry; None if there is none."""
        if reference not in self._codes:
            try:
                value = _PLAIN[-reference] if reference < 0 else self._value_of(reference)
            except LookupError:
                return None
            self._codes[reference] = len(self._objects)
            self._objects.append(value)
        return self._codes[reference]

    def _text(self, at: int) -> int:
        """Return the index among the objects of the text whose opcode is at an offset."""
        written = self._data[at + 2 : at + 2 + self._data[at + 1]]
        if written not in self._texts:
            self._objects.count_one()
            self._texts[written] = len(self._objects)
            self._objects.append(written.decode("utf-8", "surrogatepass"))
        return self._texts[written]


def _first_false(flags: Any) -> int:
    """Return how many come before the first that is false."""
    return len(flags) if flags.all() else int(flags.argmin())


def _narrow(numbers: Any) -> Any:
    """Return numbers in 32 bits if they fit."""
    import numpy as np

    fits = numbers.min() >= -1 << 31 and numbers.max() < 1 << 31
    return numbers.astype(np.int32 if fits else np.int64)
