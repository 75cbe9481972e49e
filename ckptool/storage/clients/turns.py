"""Who asks a store next that could not answer: of two clients one, so that it is asked once."""

from __future__ import annotations

import re

_BUSY = re.compile(r"status code: (?:408|429|5(?!01)\d\d)\b.*")
"""How obstore (0.12) quotes an answer that asking again later may change."""


class Busy(OSError):
    """S3 cannot answer now, and may later."""


class Turns:
    """Who asks next for a place: s3fs where obstore was put off, as it hears for how long."""

    def __init__(self) -> None:
        self._put_off: set[str] = set()

    def are_others(self, place: str) -> bool:
        """Return whether it is s3fs's turn, once."""
        is_put_off = place in self._put_off
        self._put_off.discard(place)
        return is_put_off

    def require_answer(self, place: str, error: Exception) -> None:
        """Raise Busy where an error says that S3 cannot answer now, instead of asking twice."""
        busy = _BUSY.search(str(error))
        if busy is not None:
            self._put_off.add(place)
            raise Busy(busy[0]) from None
