"""Files that look like part of a checkpoint, and that nothing read: none is left out unsaid.

Small files in the place of large ones: pointers that were never followed, a server's answers.
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


def unread_files(found: Candidate, catalog: Catalog, reported: Iterable[Problem]) -> list[Problem]:
    """What of the files below a checkpoint its catalog leaves out, though it looks like data.

    ``reported`` are problems of the scan: a file that one of them names is no news.
    """
    sizes = found.source.files
    said = {note.file for note in catalog.notes if isinstance(note, Problem)}
    known = {*catalog.files, *catalog.companions, *catalog.copies, *said}
    known |= {problem.file for problem in reported}
    left = [name for name, size in sizes.items() if size and name not in known and is_data(name)]
    left += [name for name in found.beside if is_data(name)]
    if not left:
        return []
    unfinished = [problem for name in left if (problem := unfinished_file(name))]
    left = [name for name in left if unfinished_file(name) is None]
    folders = dict(_checkpoints(found, catalog.files, left))
    loose = [name for name in left if not any(name.startswith(f"{one}/") for one in folders)]
    return [*unfinished, *_of_folders(found, folders), *_of_files(loose)]


def _checkpoints(
    found: Candidate, used: Iterable[str], left: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """The folders of files that are left which are checkpoints by themselves, and their formats."""
    taken = {str(parent) for name in used for parent in PurePosixPath(name).parents}
    beside = set(found.beside)
    inside = (PurePosixPath(name).parents for name in left if name not in beside)
    folders = dict.fromkeys(str(one) for parents in inside for one in reversed(parents))
    covered: list[str] = []
    for folder in [one for one in folders if one not in taken and one != "."][:_MOST_FOLDERS]:
        if any(folder.startswith(f"{one}/") for one in covered):
            continue
        try:
            item = detect_folder(found.source.narrowed(folder))
        except (CkptoolError, OSError):
            continue
        if item is not None:
            covered.append(folder)
            yield folder, item.name


def _of_folders(found: Candidate, folders: Mapping[str, str]) -> Iterator[Problem]:
    """One remark for all steps, and one for each part that is a checkpoint by itself."""
    steps = [folder for folder in folders if _STEP.search(folder.rpartition("/")[2])]
    parts = [folder for folder in folders if folder not in steps]
    if steps:
        message = f"other checkpoints in this folder: {_some(steps)}"
        yield Problem(message, "checkpoint-nested", file=steps[0])
    for like in _alike(parts):
        message = f"not read: {_and_more(like, '/')}, a separate checkpoint ({folders[like[0]]});"
        message += f" run `ckptool inspect {found.path / like[0]}`"
        yield Problem(message, "file-unused", file=like[0])


def _of_files(names: list[str]) -> Iterator[Problem]:
    for like in _alike(names):
        what = _TENSORLESS.get(like[0].rpartition("/")[2])
        if what is not None:
            yield Problem(f"not read: {_and_more(like)}: {what}", "note", file=like[0])
        else:
            message = f"not read: {_and_more(like)}: looks like part of a checkpoint"
            yield Problem(message, "file-unused", file=like[0])


def _alike(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in numbers only, together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[0-9]+", "#", name), []).append(name)
    return list(groups.values())


def _and_more(like: list[str], end: str = "") -> str:
    more = f" and {len(like) - 1:,} more" if len(like) > 1 else ""
    return f"{like[0]}{end}{more}"


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


_LARGEST = 4096
_TEXTS = (".html", ".htm", ".xhtml", ".xml", ".svg", ".md")
"""What is called so is what it looks like: a report, a drawing."""
_MOST = 64
"""Files that are looked at: where one is a pointer, nearly all are."""


def explain_damage(source: Files, error: Damaged) -> Damaged:
    """The error, or that files stand in for others where that is what lies behind it."""
    found = list(_stand_ins(source))
    if not found:
        return error
    file, kind = found[0]
    return Damaged(_problem(found), hint=kind.hint_for(file))


def with_cause(source: Files, problems: Iterable[Problem]) -> list[Problem]:
    """The problems, behind the one that explains them: files that stand in for others."""
    problems = list(problems)
    found = list(_stand_ins(source)) if problems else []
    return [_problem(found), *problems] if found else problems


def _problem(found: list[tuple[str, FileKind]]) -> Problem:
    file, kind = found[0]
    more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
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
