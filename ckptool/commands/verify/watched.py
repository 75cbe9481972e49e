"""Whether files stayed as they were while they were read."""

from __future__ import annotations

from collections.abc import Collection

from ckptool.engine.sources import Files
from ckptool.errors import CkptoolError, Problem


class Watched:
    """Some files of a source, from now on; a store tells of no change."""

    def __init__(self, source: Files, files: Collection[str]) -> None:
        self._source = source
        self._files = [file for file in files if file in source.files]
        self._before = self._now()

    def problems(self) -> list[Problem]:
        """A problem where one was written or replaced since: what was read is of no one save."""
        if self._now() == self._before:
            return []
        last = max(self._files, key=self._modified)
        message = f"{last}: it was changed while it was read, and perhaps others were"
        return [Problem(message, "file-changed", file=last)]

    def _now(self) -> str | None:
        """What changes when a file does; None where one is gone."""
        try:
            return self._source.fingerprint(self._files)
        except CkptoolError:
            return None

    def _modified(self, file: str) -> float:
        try:
            return self._source.modified(file)
        except CkptoolError:
            return float("inf")
