"""Which of two clients asks a busy store next, so that it is asked only once."""

from __future__ import annotations

import re

_BUSY = re.compile(r"status code: (?:408|429|5(?!01)\d\d)\b.*")
"""How obstore (0.12) quotes an answer that asking again later may change."""
_BROKEN = re.compile(r"HTTP error: (?:error sending request|request or response body error).*")
"""How it reports that a connection ended."""
_UNCONNECTED = "kind: Connect,"
"""How it reports that there never was one: repeating it does not ask anyone too often."""


class Busy(OSError):
    """A store cannot answer now, but may later."""


class Turns:
    """Which client asks next for a place: fsspec's after obstore was told to wait."""

    def __init__(self) -> None:
        self._put_off: set[str] = set()

    def are_others(self, place: str) -> bool:
        """Return whether it is the turn of fsspec's client, once."""
        is_put_off = place in self._put_off
        self._put_off.discard(place)
        return is_put_off

    def require_answer(self, place: str, error: Exception) -> None:
        """Raise Busy if an error says that there is no answer now, instead of asking twice."""
        text = str(error)
        busy = _BUSY.search(text) or (None if _UNCONNECTED in text else _BROKEN.search(text))
        if busy is not None:
            self._put_off.add(place)
            raise Busy(busy[0]) from None
