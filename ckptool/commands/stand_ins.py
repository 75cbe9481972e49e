"""Small files in the place of large ones: pointers that were never followed, a server's answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptool.engine.sources import Files
from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.formats._file_kinds import FileKind, hint_for, read_head, stand_in

_LARGEST = 4096
_TEXTS = (".html", ".htm", ".xhtml", ".xml", ".svg", ".md")
"""What is called so is what it looks like: a report, a drawing."""
_MOST = 64
"""Files that are looked at: where one is a pointer, nearly all are."""


def explained(source: Files, error: Damaged) -> Damaged:
    """The error, or that files stand in for others where that is what lies behind it."""
    found = list(_stand_ins(source))
    if not found:
        return error
    file, kind = found[0]
    return Damaged(_problem(found), hint=hint_for(kind, file))


def with_cause(source: Files, problems: Iterable[Problem]) -> list[Problem]:
    """The problems, behind the one that explains them: files that stand in for others."""
    problems = list(problems)
    found = list(_stand_ins(source)) if problems else []
    return [_problem(found), *problems] if found else problems


def _problem(found: list[tuple[str, FileKind]]) -> Problem:
    file, kind = found[0]
    more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
    return Problem(f"{file}{more}: {kind.what}", "file-unrecognised", file=file)


def _stand_ins(source: Files) -> Iterator[tuple[str, FileKind]]:
    sizes = source.files.items()
    small = [n for n, size in sizes if 0 < size <= _LARGEST and not n.lower().endswith(_TEXTS)]
    for name in small[:_MOST]:
        try:
            kind = stand_in(read_head(source, name))
        except CkptoolError:
            continue
        if kind is not None:
            yield name, kind
