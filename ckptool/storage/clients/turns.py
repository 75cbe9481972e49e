"""Who asks a store next that could not answer: of two clients one, so that it is asked once."""

from __future__ import annotations

import re

_BUSY = re.compile(r"status code: (?:408|429|5(?!01)\d\d)\b.*")
"""How obstore (0.12) quotes an answer that asking again later may change."""
_BROKEN = re.compile(r"HTTP error: (?:error sending request|request or response body error).*")
"""How it says that a connection ended."""
_UNCONNECTED = "kind: Connect,"
"""How it says that there never was one: nobody is asked too often then."""


class Busy(OSError):
    """A store cannot answer now, and may later."""


class Turns:
    """Who asks next for a place: fsspec's client where obstore was put off: it is told how long."""

    def __init__(self) -> None:
        self._put_off: set[str] = set()

    def are_others(self, place: str) -> bool:
        """Return whether it is the turn of fsspec's client, once."""
        is_put_off = place in self._put_off
        self._put_off.discard(place)
        return is_put_off

    def require_answer(self, place: str, error: Exception) -> None:
        """Raise Busy where an error says that there is no answer now, instead of asking twice."""
        text = str(error)
        busy = _BUSY.search(text) or (None if _UNCONNECTED in text else _BROKEN.search(text))
        if busy is not None:
            self._put_off.add(place)
            raise Busy(busy[0]) from None
