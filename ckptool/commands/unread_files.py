"""Files that explain what a scan lacks: data that nothing read, and stand-ins for data.

Stand-ins are small files in the place of large ones: pointers never followed, a server's answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from ckptool.commands.detect import Candidate, detect_folder
from ckptool.commands.unlisted import is_data, unfinished_file
from ckptool.core.catalog import Catalog
from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.serialization.file_kinds import FileKind, detect_placeholder, read_head
from ckptool.storage.local import Files

_STEP = re.compile(r"(?:step|iter|epoch|checkpoint|ckpt)[a-z]*[-_=.]?[0-9]", re.IGNORECASE)
_TENSORLESS = {"training_args.bin": "arguments of transformers' Trainer, no tensors"}
_MOST_FOLDERS = 200
_MOST_SHOWN = 8


def unread_files(
    candidate: Candidate, catalog: Catalog, reported: Iterable[Problem]
) -> list[Problem]:
    """Note the files below a checkpoint that look like data and that its catalog leaves out.

    ``reported`` are problems of the scan: a file that one of them names is not noted again.
    """
    sizes = candidate.source.files
    problems = [*reported, *(note for note in catalog.notes if isinstance(note, Problem))]
    known = {*catalog.files, *catalog.companions, *catalog.copies, *(p.file for p in problems)}
    unread = [name for name, size in sizes.items() if size and name not in known and is_data(name)]
    unread += [name for name in candidate.beside if is_data(name)]
    if not unread:
        return []
    unfinished = [problem for name in unread if (problem := unfinished_file(name))]
    unread = [name for name in unread if unfinished_file(name) is None]
    folders = dict(_checkpoints(candidate, catalog.files, unread))
    files = [name for name in unread if not any(name.startswith(f"{one}/") for one in folders)]
    return [*unfinished, *_folder_notes(candidate, folders), *_file_notes(files)]


def _checkpoints(
    candidate: Candidate, used: Iterable[str], unread: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield the folders of unread files that are checkpoints by themselves, and their formats."""
    occupied = {str(parent) for name in used for parent in PurePosixPath(name).parents}
    beside = set(candidate.beside)
    inside = (PurePosixPath(name).parents for name in unread if name not in beside)
    folders = dict.fromkeys(str(folder) for parents in inside for folder in reversed(parents))
    free = [folder for folder in folders if folder not in occupied and folder != "."]
    covered: list[str] = []
    for folder in free[:_MOST_FOLDERS]:
        if any(folder.startswith(f"{outer}/") for outer in covered):
            continue
        try:
            row = detect_folder(candidate.source.narrowed(folder))
        except (CkptoolError, OSError):
            continue
        if row is not None:
            covered.append(folder)
            yield folder, row.name


def _folder_notes(candidate: Candidate, folders: Mapping[str, str]) -> Iterator[Problem]:
    """Yield one note for all steps, and one for each part that is a checkpoint by itself."""
    steps = [folder for folder in folders if _STEP.search(folder.rpartition("/")[2])]
    parts = [folder for folder in folders if folder not in steps]
    if steps:
        more = f", and {len(steps) - _MOST_SHOWN} more" if len(steps) > _MOST_SHOWN else ""
        message = f"other checkpoints in this folder: {', '.join(steps[:_MOST_SHOWN])}{more}"
        yield Problem(message, "checkpoint-nested", file=steps[0])
    for like in _alike(parts):
        message = f"not read: {_and_more(like, '/')}, a separate checkpoint ({folders[like[0]]});"
        message += f" run `ckptool inspect {candidate.path / like[0]}`"
        yield Problem(message, "file-unused", file=like[0])


def _file_notes(names: list[str]) -> Iterator[Problem]:
    for like in _alike(names):
        what = _TENSORLESS.get(like[0].rpartition("/")[2])
        if what is not None:
            yield Problem(f"not read: {_and_more(like)}: {what}", "note", file=like[0])
        else:
            message = f"not read: {_and_more(like)}: looks like part of a checkpoint"
            yield Problem(message, "file-unused", file=like[0])


def _alike(names: Iterable[str]) -> list[list[str]]:
    """Group names that differ in numbers only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[0-9]+", "#", name), []).append(name)
    return list(groups.values())


def _and_more(like: list[str], end: str = "") -> str:
    more = f" and {len(like) - 1:,} more" if len(like) > 1 else ""
    return f"{like[0]}{end}{more}"


_LARGEST = 4096
_TEXTS = (".html", ".htm", ".xhtml", ".xml", ".svg", ".md")
"""Names of small files that are just that: a report, a drawing."""
_MOST = 64
"""Files that are looked at: where one is a pointer, nearly all are."""


def explain_damage(source: Files, error: Damaged) -> Damaged:
    """Return the error, or where files stand in for others one that says so, the cause."""
    files = list(_stand_ins(source))
    if not files:
        return error
    file, kind = files[0]
    return Damaged(_problem(files), hint=kind.hint_for(file))


def with_cause(source: Files, problems: Iterable[Problem]) -> list[Problem]:
    """Put the problem that explains the others before them: files that stand in for others."""
    problems = list(problems)
    files = list(_stand_ins(source)) if problems else []
    return [_problem(files), *problems] if files else problems


def _problem(files: list[tuple[str, FileKind]]) -> Problem:
    file, kind = files[0]
    more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    return Problem(f"{file}{more}: {kind.what}", "file-type-mismatch", file=file)


def _stand_ins(source: Files) -> Iterator[tuple[str, FileKind]]:
    sizes = source.files.items()
    small = [n for n, size in sizes if 0 < size <= _LARGEST and not n.lower().endswith(_TEXTS)]
    for name in small[:_MOST]:
        try:
            kind = detect_placeholder(read_head(source, name))
        except CkptoolError:
            continue
        if kind is not None:
            yield name, kind
