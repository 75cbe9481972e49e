"""The journals beside a staging folder: one for each rank, or part, that writes into it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ckptool.engine.write.journal import Journal, Noted, read_journal
from ckptool.engine.write.schemas import JournalHead
from ckptool.errors import Unsupported
from ckptool.storage.disk import in_the_way
from ckptool.storage.note import open_note, read_note

_TOKEN = re.compile(b"[0-9a-f]{0,16}")


class Journals:
    """The journals of one output by their numbers, and those that this process holds.

    Number 0 is the first rank's, or part's; who holds it begins and commits a whole output. A mark
    beside the journals shows processes whether they see the same disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._head = f"{folder.name}.journal."
        self._mark = folder.with_name(f"{self._head}mark")
        self.held: dict[int, Journal] = {}

    def path(self, number: int) -> Path:
        """Return where the journal of this number is, if it is."""
        return self._folder.with_name(f"{self._head}{number}")

    def there(self) -> dict[int, Path]:
        """Return the journals that are there."""
        journal = re.compile(re.escape(self._head) + "(0|[1-9][0-9]{0,5})")
        names: list[str] = []
        with suppress(FileNotFoundError, PermissionError):
            names = os.listdir(self._folder.parent)
        found = sorted(self._folder.with_name(n) for n in names if journal.fullmatch(n))
        return {int(path.suffix[1:]): path for path in found}

    def read(self) -> dict[int, Noted]:
        """Read the journals that are there; Unsupported if one is not as ckptool writes it."""
        noted = {}
        for number, path in self.there().items():
            with suppress(FileNotFoundError):  # its process has ended just now
                noted[number] = read_journal(path)
        return noted

    def heads(self) -> dict[int, JournalHead]:
        """Return how those journals begin that have begun."""
        return {n: noted.head for n, noted in self.read().items() if noted.head is not None}

    def require_ours(self) -> None:
        """Raise Unsupported if a journal, or the mark beside journals, is not ckptool's."""
        noted = self.read()
        with suppress(FileNotFoundError):
            token = read_note(self._mark)
            if not (noted and _TOKEN.fullmatch(token)):
                raise in_the_way(self._mark)

    def require_untouched(self, state: str, numbers: Iterable[int]) -> None:
        """Raise Unsupported if some of them began with another ``state`` of the source's files."""
        heads = self.heads()
        for number in numbers:
            if number in heads and heads[number].state not in (None, state):
                why = "the source was written to, or touched, since the run began"
                raise Unsupported(
                    f"{self.path(number)}: cannot resume: {why}",
                    hint="leave out --no-verify: the output is then compared with the source",
                )

    def noted_sizes(self, expected: Mapping[str, int]) -> dict[str, int]:
        """Return the files that are listed as being written, with the larger of the sizes.

        ``expected`` are those of a run that starts over: a truncated journal lists none.
        """
        sizes = dict(expected)
        for head in self.heads().values():
            for name, size in (head.files or {}).items():
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    def hold(self, number: int) -> Journal:
        """Open a journal as it is and lock it; Unsupported if another process has it."""
        journal = self.held[number] = Journal.lock(self.path(number))
        return journal

    def require_idle(self) -> None:
        """Raise Unsupported if another process, such as one that writes a part, has a journal."""
        for number, path in self.there().items():
            if number:
                Journal.lock(path).close()

    def mark(self, token: str) -> None:
        """Leave a mark that is visible to all processes on this disk."""
        with open(open_note(self._mark, os.O_WRONLY | os.O_CREAT), "wb") as stream:
            stream.truncate()
            stream.write(token.encode())

    def is_marked(self, token: str) -> bool:
        """Return whether the mark is visible here."""
        return self._mark.is_file() and read_note(self._mark) == token.encode()

    def remove(self) -> None:
        """Remove the mark and all journals, the first one last."""
        self._mark.unlink(missing_ok=True)
        for path in reversed(self.there().values()):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others write here."""
        for journal in self.held.values():
            journal.close()
