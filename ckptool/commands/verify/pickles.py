"""What the pickles of a checkpoint name, and where."""

from __future__ import annotations

from collections.abc import Mapping

from ckptool.errors import Problem
from ckptool.formats._known_globals import is_harmless, is_known
from ckptool.formats._pickle import Global, can_run_code, named_globals

_SMALL = 4096


class PickleAudit:
    """Follows pickles without running them; ``problems`` name what does not belong in one.

    A class or function is reported once a file, where it is named first.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._reported: set[tuple[str, Global]] = set()
        self._small: dict[bytes, dict[Global, int]] = {}

    def look_at(self, data: bytes, file: str, offset: int | None, *, pickles: int = 1) -> bool:
        """``pickles`` in a row, from ``offset`` of the file; None where they are compressed.

        Returns whether all that they name belongs there.
        """
        return self.note(self._named(data, pickles), file, offset)

    def note(self, named: Mapping[Global, int], file: str, offset: int | None) -> bool:
        """What a pickle was seen to name, as ``look_at`` does."""
        belongs = True
        for item, at in named.items():
            hostile = can_run_code(item) and item.name != "getattr"
            if not hostile and is_known(item):
                continue
            belongs = False
            if (file, item) not in self._reported:
                self._reported.add((file, item))
                self.problems.append(_problem(item, file, offset, at, hostile=hostile))
        return belongs

    def _named(self, data: bytes, pickles: int) -> dict[Global, int]:
        """Small pickles are alike by the thousand, so what they name is remembered."""
        if len(data) > _SMALL or pickles > 1:
            return named_globals(data, pickles=pickles)
        if data not in self._small:
            self._small[data] = named_globals(data)
        return self._small[data]


def _problem(item: Global, file: str, offset: int | None, at: int, *, hostile: bool) -> Problem:
    place = f"at byte {at:,} of its compressed pickle"
    if offset is not None:
        place = f"at byte {offset + at:,}"
    code, meaning = "unknown-callable", "is on no list of known data; nothing was called"
    if hostile:
        code, meaning = "hostile-global", "can run code; nothing was called"
    elif is_harmless(item):
        code, meaning = "unknown-global", "is no part of a plain checkpoint"
    return Problem(f"{file}: the pickle {place} names {item}, which {meaning}", code, file=file)
