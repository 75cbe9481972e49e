"""Rows of columns: repeated instances of a class in a pickle, and their memo entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from msgspec import Struct

from ckptool.serialization.pickle.records import TORCH_SIZE, Call, Global, RowObjects

OBJECT, TEXT, INTEGER = -1, -2, -3
"""The kind of a row's field that is not a size: sizes have their number of dims."""


class RowClass(Struct, frozen=True):
    """A class with similar instances: the opcodes of its reference and of its fields' names."""

    function: Global
    names: tuple[str, ...]
    reference: bytes
    fields: tuple[bytes, ...]


class Column(NamedTuple):
    """A field of ``n`` rows: the kind of each, and its numbers, ``[n, dims]``.

    The number of an object or a text is its index in the list of all of a pickle.
    """

    kinds: Any
    numbers: Any

    def narrowed(self) -> Column:
        """Return a copy of as many dims as there are, in 32 bits if all numbers fit."""
        import numpy as np

        numbers = self.numbers[:, : max(1, int(self.kinds.max()))]
        fits = numbers.min() >= -1 << 31 and numbers.max() < 1 << 31
        return Column(self.kinds.copy(), numbers.astype(np.int32 if fits else np.int64))


class Rows:
    """Consecutive instances of one class, as columns; ``objects`` are what these refer to.

    It represents all of its instances in a list; or in a dict as one key, whose value are the rows
    with the value of each. ``instances`` are the entries of those that were requested one by one.
    """

    __slots__ = ("columns", "function", "instances", "objects")

    def __init__(self, row_class: RowClass, columns: list[Column], objects: RowObjects) -> None:
        self.function = row_class.function
        self.columns = dict(zip(row_class.names, columns, strict=True))
        self.objects = objects
        self.instances: dict[int, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).numbers)

    def notes(self, row: int) -> tuple[Any, ...]:
        """Return the memo entries of a row: the record, its state, its fields' content."""
        if row not in self.instances:
            self.objects.count_one()
            state: dict[str, Any] = {}
            noted: list[Any] = [Call(self.function, (), True, state), state]
            for name, (kinds, numbers) in self.columns.items():
                kind, values = int(kinds[row]), numbers[row].tolist()
                if kind == INTEGER:
                    state[name] = values[0]
                elif kind < 0:
                    state[name] = self.objects[values[0]]
                    noted += [state[name]] * (kind == TEXT)
                else:
                    sizes = tuple(values[:kind])
                    state[name] = call = Call(TORCH_SIZE, (sizes,))
                    noted += [*([sizes] if sizes else []), call.args, call]
            self.instances[row] = tuple(noted)
        return self.instances[row]

    def __iter__(self) -> Iterator[Call]:
        """Yield the instances, as the machine would have made them."""
        return (self.notes(row)[0] for row in range(len(self)))


def expand_rows(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, with an instance each for those that represent many."""
    return chain.from_iterable(value if type(value) is Rows else (value,) for value in values)


class RowRun:
    """Alternating rows, one of each class: their memo entries, by number."""

    __slots__ = ("_begins", "noted", "rows")

    def __init__(self, rows: tuple[Rows, ...]) -> None:
        self.rows = rows
        self._begins: Any = None
        self.noted = sum(int(count_notes(part.columns.values()).sum()) for part in rows)

    def __getitem__(self, index: int) -> Any:
        """Return the ``index``-th memo entry of the run."""
        import numpy as np

        if self._begins is None:
            tables = [part.columns.values() for part in self.rows]
            counts = np.stack(list(map(count_notes, tables)), axis=1).ravel()
            self._begins = np.cumsum(counts) - counts
        at = int(np.searchsorted(self._begins, index, side="right")) - 1
        rows = self.rows[at % len(self.rows)]
        return rows.notes(at // len(self.rows))[index - int(self._begins[at])]


def count_of_kinds(kinds: Any) -> Any:
    """Return the number of memo entries of values: a text one, a size three, an empty one two.

    All are integers, or all are sizes, or none is either.
    """
    if kinds[0] == INTEGER:
        return 0
    return 2 + (kinds > 0) if kinds[0] >= 0 else kinds == TEXT


def count_notes(columns: Iterable[Column]) -> Any:
    """Return the number of memo entries of each row."""
    import numpy as np

    every = list(columns)
    counts = np.full(len(every[0].kinds), 2, np.int64)
    for column in every:
        counts += count_of_kinds(column.kinds)
    return counts
