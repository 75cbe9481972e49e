"""Whether files stayed as they were while they were read."""

from __future__ import annotations

from collections.abc import Collection

from ckptool.engine.file_status import changed
from ckptool.engine.sources import Files
from ckptool.errors import Problem


class Watched:
    """Some files of a source, since it was listed."""

    def __init__(self, source: Files, files: Collection[str]) -> None:
        self._source = source
        self._files = [file for file in files if file in source.files]

    def problems(self) -> list[Problem]:
        """A problem where one was written or replaced since: what was read is of no one save."""
        found = self._source.changed(self._files)
        return list(changed(found).problems) if found else []
