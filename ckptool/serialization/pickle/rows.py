"""Rows of columns: instances of a class that a pickle repeats, and what they put into its memo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ckptool.serialization.pickle.records import TORCH_SIZE, Call, Global, RowObjects

OBJECT, TEXT, INTEGER = -1, -2, -3
"""What a field of a row is, where it is no size: those are the number of its dims."""


class RowClass(NamedTuple):
    """A class whose instances are alike: the opcodes of its reference and of its fields' names."""

    function: Global
    names: tuple[str, ...]
    reference: bytes
    fields: tuple[bytes, ...]


class Column(NamedTuple):
    """A field of ``n`` rows: the kind of each, and its numbers, ``[n, dims]``.

    The number of an object or a text is its place in the list of all of a pickle.
    """

    kinds: Any
    numbers: Any


class Rows:
    """Instances of one class in a row, as columns; ``objects`` are what these refer to.

    It stands on the machine's stack, and in the lists and dicts that are made of it, for all of its
    instances. ``begin`` is where these begin in the pickle, those of a class that they take turns
    with, too. ``made`` are those that were requested one by one.
    """

    __slots__ = ("begin", "columns", "function", "made", "objects")

    def __init__(
        self, of: RowClass, columns: list[Column], objects: RowObjects, begin: int
    ) -> None:
        self.begin = begin
        self.function = of.function
        self.columns = dict(zip(of.names, columns, strict=True))
        self.objects = objects
        self.made: dict[int, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).numbers)

    def notes(self, row: int) -> tuple[Any, ...]:
        """Return what a row puts into the memo: the record, its state, what its fields hold."""
        if row not in self.made:
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
            self.made[row] = tuple(noted)
        return self.made[row]

    def __iter__(self) -> Iterator[Call]:
        """Yield the instances, as the machine would have made them."""
        return (self.notes(row)[0] for row in range(len(self)))


def expand_rows(values: list[Any]) -> list[Any]:
    """Return values with an instance each for those that stand for many."""
    flat: list[Any] = []
    for value in values:
        flat.extend(value) if type(value) is Rows else flat.append(value)
    return flat


class Run:
    """Rows that take turns, one of each class: what they put into the memo, by number."""

    __slots__ = ("_begins", "nbytes", "noted", "rows")

    def __init__(self, rows: tuple[Rows, ...], nbytes: int) -> None:
        self.rows = rows
        self.nbytes = nbytes
        self._begins: Any = None
        self.noted = sum(int(count_notes(each.columns.values()).sum()) for each in rows)

    def __getitem__(self, index: int) -> Any:
        """Return what the run put into the memo as the ``index``-th."""
        import numpy as np

        if self._begins is None:
            tables = [each.columns.values() for each in self.rows]
            counts = np.stack(list(map(count_notes, tables)), axis=1).ravel()
            self._begins = np.cumsum(counts) - counts
        at = int(np.searchsorted(self._begins, index, side="right")) - 1
        rows = self.rows[at % len(self.rows)]
        return rows.notes(at // len(self.rows))[index - int(self._begins[at])]


def count_of_kinds(kinds: Any) -> Any:
    """Return how much values put into the memo: a text itself, a size three, an empty one two.

    All are integers, or all are sizes, or none is either.
    """
    if kinds[0] == INTEGER:
        return 0
    return 2 + (kinds > 0) if kinds[0] >= 0 else kinds == TEXT


def count_notes(columns: Iterable[Column]) -> Any:
    """Return how much each row puts into the memo."""
    import numpy as np

    every = list(columns)
    counts = np.full(len(every[0].kinds), 2, np.int64)
    for column in every:
        counts += count_of_kinds(column.kinds)
    return counts
