"""A source in memory: the two ends of a decoded blob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptool.errors import Damaged


class EdgeSource:
    """One file of ``size`` bytes, of which the first and the last ones are at hand."""

    def __init__(self, file: str, head: bytes, tail: bytes, size: int) -> None:
        self._head, self._tail = head, tail
        self._size = size
        self.root = file
        self.files: Mapping[str, int] = {file: size}

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` at ``offset``; Damaged where they are not at hand."""
        if 0 <= offset <= offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        inside = offset - (self._size - len(self._tail))
        if inside >= 0 and nbytes >= 0 and inside + nbytes <= len(self._tail):
            return self._tail[inside : inside + nbytes]
        raise Damaged(f"{file}: {nbytes:,} bytes at {offset:,} of a packed item are out of reach")

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """All is at hand."""

    def narrowed(self, folder: str) -> EdgeSource:
        """A blob has no folders."""
        raise Damaged(f"{self.root}: no folder {folder}")
