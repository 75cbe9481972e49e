"""Instances that a pickle repeats thousands of times, read into columns.

A metadata pickle of a million chunks is a million instances of the same three classes, in batches
of a thousand. Possible beginnings of instances are searched for; then each field is read for all of
them at once. One counts only if its opcodes end just where the next begins, or a batch of the same
list or dict does, so by induction all are what the machine would have read one by one. The last
batch must end, too: what ends it says where its rows go. Whatever does not match is left to the
machine.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptool.core.box import distinct
from ckptool.serialization.pickle.memo import Memo
from ckptool.serialization.pickle.records import TORCH_SIZE, RowObjects
from ckptool.serialization.pickle.rows import (
    INTEGER,
    OBJECT,
    TEXT,
    Column,
    RowClass,
    RowRun,
    Rows,
    count_notes,
    count_of_kinds,
)
from ckptool.serialization.pickle.window import Window

LEAST = 64
_MOST_DIMS = 8
_FIRST_SIZE, _LARGEST_SIZE = 1 << 15, 1 << 19
"""Bytes of windows: four times what the last rows took, so that a hostile pickle of a few rows at a
time is not cut out and searched a hundred times over."""
_MOST_KNOWN = 16
_BATCHES = {1: b"e(", 2: b"u("}
"""What ends a batch of rows and begins the next, by the number of their classes.

APPENDS or SETITEMS, and MARK.
"""
BEGIN = b")\x81\x94}\x94("
"""EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK."""
_SHORT_TEXT, _LONG1, _MEMOIZE = 0x8C, 0x8A, 0x94
PLAIN = {ord("N"): None, 0x88: True, 0x89: False}
"""The values that are an opcode alone."""
_SIZE_END = b"\x85\x94R\x94"
"""TUPLE1, MEMOIZE, REDUCE, MEMOIZE."""


class _KnownRun(NamedTuple):
    """Rows that were read from ``data``; if a batch ends there, ``ending`` is the opcode for it."""

    data: bytes
    classes: Sequence[RowClass]
    table: list[list[Column]]
    starts: Any
    ending: bytes


class RowReader:
    """Reads rows from ``pickled``, and adds their entries to the machine's memo."""

    def __init__(self, pickled: bytes, memo: Memo) -> None:
        import numpy as np

        self._pickled = pickled
        self._memo = memo
        self._size = _FIRST_SIZE
        self._odd_position = -1
        self._objects = RowObjects()
        self._codes: dict[int, int] = {}
        self._texts: dict[bytes, int] = {}
        self._runs: deque[_KnownRun] = deque(maxlen=_MOST_KNOWN)
        self._lengths, self._signs = np.zeros(256, np.int64), np.zeros(256, np.int64)
        self._lengths[list(b"KMJ")] = 1, 2, 4
        self._signs[ord("J")] = 1 << 31
        self._masks = np.array([(1 << 8 * length) - 1 for length in range(9)], np.uint64)
        self._begins_size = np.isin(np.arange(256), list(b"KMJ\x8a()"))

    def forget(self) -> None:
        """Drop memo entries, some of which have changed."""
        self._codes.clear()
        self._runs.clear()

    def read(
        self, pos: int, frame_end: int, classes: Sequence[RowClass]
    ) -> tuple[list[RowRun], int, int] | None:
        """Read the rows of one class, or alternating ones of two, up to the end of a batch.

        Returns the offset of the opcode that ends it and the end of the frame there, too. None if
        the rows at ``pos`` are few, or those up to the end are not all alike.
        """
        runs: list[RowRun] = []
        is_open = pos > self._odd_position
        while is_open:
            self._window = window = Window(self._pickled, pos, self._size, frame_end)
            if runs and window.data.startswith(_BATCHES[len(classes)][:1]):
                break
            run = self._find_known(classes) or self._read_run(classes, 1 if runs else LEAST)
            if run is None:
                self._odd_position = pos
                self._drop(runs)
                break
            length, pairs = len(run.data), zip(classes, run.table, strict=True)
            runs.append(
                RowRun(tuple(Rows(kind, columns, self._objects) for kind, columns in pairs))
            )
            self._memo.add_run(runs[-1])
            self._size = min(max(4 * length, _FIRST_SIZE), _LARGEST_SIZE)
            pos, frame_end = window.place(length)
            is_open = not run.ending
        return (runs, pos, frame_end) if runs else None

    def _drop(self, runs: list[RowRun]) -> None:
        """Drop the runs of a batch that cannot be read to its end."""
        if runs:
            self.forget()
        while runs:
            self._memo.remove_run(runs.pop())

    def _read_run(self, classes: Sequence[RowClass], least: int) -> _KnownRun | None:
        """Read the rows at the beginning of the window; None if they are few."""
        import numpy as np

        window, noted, batch = self._window, self._memo.next_number, _BATCHES[len(classes)]
        begin = classes[0].reference + BEGIN
        matches = re.compile(re.escape(begin)).finditer(window.data, 0, window.last)
        starts = np.array(list(map(re.Match.start, matches)), np.int64)
        if len(starts) < least or starts[0] != 0:
            return None
        good = np.ones(len(starts), bool)
        cursor = starts
        table: list[list[Column]] = []
        for row_class in classes:
            columns = []
            expected = row_class.reference + BEGIN
            for field in row_class.fields:
                cursor = self._literal(cursor, expected + field, good)
                column, cursor = self._field(cursor, good)
                columns.append(column)
                expected = b""
            cursor = self._literal(cursor, b"ub", good)
            table.append(columns)
        good[1:] &= self._follow(cursor[:-1], starts[1:], batch)
        count = _first_false(good)
        if count >= least:
            count = window.first_torn(starts[:count], int(cursor[count - 1]))
        while count >= least:
            count, ending = self._end_of_batches(cursor[:count], starts[:count], batch[:1])
            table = [[Column(k[:count], n[:count]) for k, n in columns] for columns in table]
            count = self._resolve(table, noted)
            if count == len(table[0][0].kinds):
                rows = window.data[: int(cursor[count - 1])]
                return self._keep(_KnownRun(rows, classes, table, starts[:count], ending))
        return None

    def _follow(self, ends: Any, starts: Any, batch: bytes) -> Any:
        """Return which rows begin where the one before ends, or after the end of a batch."""
        follow = ends == starts
        if follow.all():
            return follow
        mask, number = self._masks[len(batch)], int.from_bytes(batch, "little")
        is_batch = (self._window.words[ends] & mask) == number
        return follow | (is_batch & (ends + len(batch) == starts))

    def _end_of_batches(self, ends: Any, starts: Any, ending: bytes) -> tuple[int, bytes]:
        """Return how many rows are in batches that end, and the opcode that follows these.

        If there is no end of a batch, return all rows, which are not known to be one yet.
        """
        import numpy as np

        if self._window.data.startswith(ending, int(ends[-1])):
            return len(ends), ending
        last = np.flatnonzero(ends[:-1] != starts[1:])[-1:].tolist()
        return (last[0] + 1, ending) if last else (len(ends), b"")

    def _keep(self, run: _KnownRun) -> _KnownRun:
        """Keep rows that may be repeated: the chunks of the next tensor, which is cut alike."""
        if not any((kinds == TEXT).any() for columns in run.table for kinds, _ in columns):
            self._runs.append(run)
        return run

    def _find_known(self, classes: Sequence[RowClass]) -> _KnownRun | None:
        """Return the longest of the known runs that come again in the window."""
        window, longest = self._window, None
        for run in self._runs:
            size = len(run.data)
            is_like = run.classes == classes and size <= window.last
            if is_like and (longest is None or size > len(longest.data)):
                is_same = window.data.startswith(run.data + run.ending)
                if is_same and window.first_torn(run.starts, size) == len(run.starts):
                    longest = run
        return longest

    def _literal(self, at: Any, opcodes: bytes, good: Any) -> Any:
        """Return the offsets after opcodes that are the same in all rows."""
        for begin in range(0, len(opcodes), 8):
            piece = opcodes[begin : begin + 8]
            words = self._window.words[at + begin] & self._masks[len(piece)]
            good &= words == int.from_bytes(piece, "little")
        return self._within(at + len(opcodes), good)

    def _within(self, at: Any, good: Any) -> Any:
        """Return offsets from which opcodes can be read; too long rows are invalid."""
        if at.max() > self._window.last:
            good &= at <= self._window.last
            return at.clip(max=self._window.last)
        return at

    def _field(self, at: Any, good: Any) -> tuple[Column, Any]:
        """Read a value of each row; return the offsets after them, too.

        Valid are those of the first one's kind: integers, plain ones, sizes, or else memo entries
        and text.
        """
        import numpy as np

        opcodes = self._window.bytes[at]
        first = int(opcodes[0])
        if self._lengths[first] or first == _LONG1:
            numbers, end = self._integers(at, opcodes)
            good &= end > at
            return Column(np.full(len(at), INTEGER, np.int8), numbers[:, None]), end
        kinds = np.full(len(at), OBJECT, np.int8)
        if first in PLAIN:
            good &= opcodes == first
            return Column(kinds, np.full((len(at), 1), -first)), at + 1
        wide = opcodes == ord("j")
        numbers = (self._window.words[at + 1] & self._masks[np.where(wide, 4, 1)]).view(np.int64)
        end = at + np.where(wide, 5, 2)
        rest = ~wide & (opcodes != ord("h"))
        if rest.any():
            is_text = opcodes == _SHORT_TEXT
            good &= is_text >= rest
            kinds[is_text] = TEXT
            end = self._within(np.where(is_text, end + numbers + 1, end), good)
            good &= ~is_text | (self._window.bytes[end - 1] == _MEMOIZE)
            numbers = np.where(is_text, at, numbers)
        end = self._within(end, good)
        column = Column(kinds, numbers[:, None])
        is_size = self._begins_size[int(self._window.bytes[end[0]])] and kinds[0] == OBJECT
        return self._sizes(end, column, good) if is_size else (column, end)

    def _integers(self, at: Any, opcodes: Any) -> tuple[Any, Any]:
        """Read integers; the end of an invalid one is its beginning."""
        import numpy as np

        lengths, signs = self._lengths[opcodes], self._signs[opcodes]
        begin = at + 1
        is_long = opcodes == _LONG1
        if is_long.any():
            written = self._window.bytes[begin].astype(np.int64)
            is_long &= (written >= 4) & (written <= 8)
            lengths = np.where(is_long, written, lengths)
            signs = np.where(is_long, np.int64(1) << (8 * written - 1) % 64, signs)
            begin = begin + is_long
        numbers = (self._window.words[begin] & self._masks[lengths]).view(np.int64)
        return (numbers ^ signs) - signs, np.where(lengths > 0, begin + lengths, at)

    def _sizes(self, begin: Any, column: Column, good: Any) -> tuple[Column, Any]:
        """Read what follows references as the sizes of a ``torch.Size``."""
        import numpy as np

        good &= column.kinds == OBJECT
        references = distinct(column.numbers[good, 0]).tolist()
        if any(self._value(reference) is not TORCH_SIZE for reference in references):
            good[:] = False
        opcodes = self._window.bytes[begin]
        has_mark = opcodes == ord("(")
        cursor, dims = begin + has_mark, np.zeros(len(begin), np.int64)
        sizes = []
        going = np.ones(len(begin), bool)
        for _ in range(_MOST_DIMS):
            values, end = self._integers(cursor, self._window.bytes[cursor])
            going &= end > cursor
            if not going.any():
                break
            sizes.append(values if going.all() else np.where(going, values, 0))
            dims += going
            cursor = self._within(np.where(going, end, cursor), good)
        closing = np.where(has_mark, ord("t"), np.where(dims > 0, 0x84 + dims, ord(")")))
        good &= (self._window.bytes[cursor] == closing) & (has_mark == (dims > 3))
        cursor = self._within(cursor + 1, good)
        good &= (dims == 0) | (self._window.bytes[cursor] == _MEMOIZE)
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
        places: list[list[Any]] = []
        texts: list[tuple[Any, Any]] = []
        for columns, begin in zip(table, begins.T, strict=True):
            places.append([begin + 2])
            for kinds, numbers in columns:
                at, is_text = places[-1][-1], kinds == TEXT
                if is_text.any():
                    texts.append((at[is_text], self._read_texts(numbers[is_text, 0])))
                places[-1].append(at + count_of_kinds(kinds))
        done: list[list[Column]] = [[] for _ in table]
        for target, columns, begin, ats in zip(done, table, begins.T, places, strict=True):
            for column, at in zip(columns, ats, strict=False):
                codes = column
                if column.kinds[0] in (OBJECT, TEXT):
                    codes, holds = self._resolve_column(column, noted, begin, at, texts)
                    if not holds.all():
                        return _first_false(holds)
                target.append(codes.narrowed())
        table[:] = done
        return len(counts)

    def _resolve_column(
        self, column: Column, noted: int, begin: Any, at: Any, texts: list[tuple[Any, Any]]
    ) -> tuple[Column, Any]:
        """Return a column of codes, and which rows are known.

        Rows begin their memo entries at ``begin``, the column's text at ``at``; ``texts`` are the
        numbers of the run's own text and its codes. A row can refer to an earlier one's entry.
        """
        import numpy as np

        kinds, numbers = column
        is_text = kinds == TEXT
        references = np.where(is_text, at, numbers[:, 0])
        firsts = np.flatnonzero(np.append(True, references[1:] != references[:-1]))
        codes = self._codes_of(references[firsts], noted, texts)
        codes = np.repeat(codes, np.diff(firsts, append=len(references)))
        holds = (codes >= 0) & (is_text | (references < noted) | (references < begin))
        return Column(kinds, codes[:, None]), holds

    def _codes_of(self, references: Any, noted: int, texts: list[tuple[Any, Any]]) -> Any:
        """Return the code of each memo number or opcode, -1 if it is none."""
        import numpy as np

        codes = np.full(len(references), -1, np.int64)
        is_older = references < noted
        older, inverse = np.unique(references[is_older], return_inverse=True)
        older_codes = [self._code(number) for number in older.tolist()]
        codes[is_older] = np.array([-1 if n is None else n for n in older_codes], np.int64)[inverse]
        for at, text_codes in texts:
            place = np.searchsorted(at, references).clip(max=len(at) - 1)
            codes = np.where(at[place] == references, text_codes[place], codes)
        return codes

    def _value(self, reference: int) -> Any:
        """Return the memo entry of a number, and for an opcode's negative what it pushes."""
        code = self._code(reference)
        return None if code is None else self._objects[code]

    def _code(self, reference: int) -> int | None:
        """Return the index among the objects of a memo entry; None if there is none."""
        if reference not in self._codes:
            try:
                value = PLAIN[-reference] if reference < 0 else self._memo[reference]
            except LookupError:
                return None
            self._codes[reference] = len(self._objects)
            self._objects.append(value)
        return self._codes[reference]

    def _read_texts(self, begins: Any) -> Any:
        """Return the indices among the objects of the texts whose opcodes are at offsets.

        Bytes that are no text have the index -1.
        """
        import numpy as np

        data, indices = self._window.data, self._texts
        ends = begins + 2 + self._window.bytes[begins + 1]
        pairs = zip((begins + 2).tolist(), ends.tolist(), strict=True)
        written = [data[begin:end] for begin, end in pairs]
        for text in dict.fromkeys(written):
            if text not in indices:
                try:
                    decoded = text.decode("utf-8", "surrogatepass")
                except UnicodeDecodeError:
                    indices[text] = -1
                    continue
                self._objects.count_one()
                indices[text] = len(self._objects)
                self._objects.append(decoded)
        return np.array([indices[text] for text in written], np.int64)


def _first_false(flags: Any) -> int:
    """Return how many come before the first that is false."""
    return len(flags) if flags.all() else int(flags.argmin())
