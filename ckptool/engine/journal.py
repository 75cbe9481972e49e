"""Which files of a transfer are finished, so that a killed one can be resumed."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from ckptool.errors import CannotDo


class Journal:
    """An append-only list of finished files, kept beside the folder that they are staged in.

    The first line holds the digests of the plan and of the source's files; each further line a
    finished file. The open file is locked: two processes never write one stage.
    """

    def __init__(self, stream: IO[str] | None, finished: frozenset[str] = frozenset()) -> None:
        self._stream = stream
        self._finished = finished
        self._lock = threading.Lock()

    @classmethod
    def start(cls, path: Path, plan: str, source: str) -> Journal:
        """A new journal. CannotDo where another process holds it."""
        stream = _locked(path)
        stream.truncate(0)
        journal = cls(stream)
        journal._append(journal_head(plan, source))
        return journal

    @classmethod
    def resume(cls, path: Path, plan: str, source: str, others: Iterable[Path] = ()) -> Journal:
        """The journal of an earlier run of the same plan over the same source.

        ``others`` are journals that further ranks kept of the same output. CannotDo where plan or
        source are not those of the earlier run.
        """
        stream = _locked(path)
        finished: set[str] = set()
        try:
            begun = [one for one in {path, *others} if one.stat().st_size]
            for one in begun:
                finished |= _finished(one, {"source": source, "plan": plan})
        except CannotDo:
            stream.close()
            raise
        journal = cls(stream, frozenset(finished))
        if path not in begun:
            journal._append(journal_head(plan, source))
        return journal

    def has(self, path: str) -> bool:
        """Whether an earlier run finished this file."""
        return path in self._finished

    def done(self, path: str) -> None:
        """This file is written (and synced, where that was asked)."""
        self._append({"done": path})

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _append(self, line: dict[str, str]) -> None:
        if self._stream is None:
            return
        with self._lock:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()


NO_JOURNAL = Journal(None)


def journal_head(plan: str, source: str) -> dict[str, str]:
    return {"schema": "ckptool.journal/1", "plan": plan, "source": source}


def _locked(path: Path) -> IO[str]:
    stream = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (kept open for its lock)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise CannotDo(f"{path}: another ckptool is writing this target") from None
    return stream


def _finished(path: Path, expected: dict[str, str]) -> set[str]:
    """The files that a journal lists, once its head is what is expected."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    head = _parsed(lines[0]) if lines else {}
    require_same_run(str(path), head, expected)
    return {str(_parsed(line).get("done")) for line in lines[1:]}


def require_same_run(path: str, head: Mapping[str, object], expected: Mapping[str, str]) -> None:
    """CannotDo where a journal begins with other digests than those that are expected."""
    for what, digest in expected.items():
        if head.get(what) != digest:
            raise CannotDo(
                f"{path}: cannot resume: the {what} is not the one that was begun with",
                hint="run again without --resume to start afresh",
            )


def _parsed(line: str) -> dict[str, object]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
