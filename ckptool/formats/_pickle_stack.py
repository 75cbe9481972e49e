"""The stack of the pickle machine, and the program that it reads."""

from __future__ import annotations

from typing import Any

from ckptool.errors import Damaged, Problem


class _Mark:
    __slots__ = ()


MARK = _Mark()


class Stack:
    """A program at a position, and what its opcodes have pushed.

    IndexError says that the program or the stack ends too early, Damaged what else is malformed.
    """

    def __init__(self, data: bytes, start: int, what: str) -> None:
        self._data = data
        self.pos = start
        self._start = start
        self.what = what
        self._stack: list[Any] = []
        self._marks: list[int] = []

    def malformed(self, reason: str) -> Damaged:
        place = f"{self.what}: malformed pickle at byte {self.pos - self._start:,}"
        return Damaged(Problem(f"{place}: {reason}", "pickle-malformed"))

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

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        self._stack.append(MARK)

    def _pop_mark(self) -> list[Any]:
        """What lies above the last mark. POP may have dropped marks that are still noted."""
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

    def _drop(self) -> None:
        self._stack.pop()

    def _drop_to_mark(self) -> None:
        self._pop_mark()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _top(self) -> Any:
        value = self._stack[-1]
        if value is MARK:
            raise self.malformed("a mark where a value is expected")
        return value
