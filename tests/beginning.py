"""Progress that does something before the first byte is read."""

from __future__ import annotations

from collections.abc import Callable

from ckptool.engine.progress import Progress


class AtTheBeginning(Progress):
    """Calls a function once it is known how much is to be read."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._at_beginning = call

    def begin(self, total: int) -> None:
        """Do it, each time that counting begins."""
        super().begin(total)
        self._at_beginning()
