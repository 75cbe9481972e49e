"""Detect what a path is: a checkpoint, part of one, a folder of several, or none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.unread_files import require_listed, unlisted_problems
from ckptool.core.text import list_some, natural_key, one_of
from ckptool.errors import CkptoolError, NotFound, Problem, Several, Unrecognized, UsageError
from ckptool.formats import FORMATS, detect, file_rule, single_file_suffixes
from ckptool.formats.base import EXTRA, FileRole, Format, ScanOptions
from ckptool.formats.companions import latest_folder
from ckptool.serialization.file_kinds import (
    detect_kind,
    has_no_suffix,
    holds_counts_alone,
    is_unnamed_torch,
    larger_names,
    nothing_found,
    read_head,
    require_packed,
)
from ckptool.storage.commit_note import require_finished, unfinished_problem
from ckptool.storage.file_status import lies_in
from ckptool.storage.files import Files
from ckptool.storage.local import LocalSource
from ckptool.storage.place import (
    ARCHIVE,
    archive_in,
    file_at,
    folder_at,
    folder_of,
    names_in,
    on_disk,
    require_there,
    run_bounded,
)
from ckptool.storage.url import Location, within
from ckptool.storage.virtual.placed import PlacedFiles

_LEVELS = 4
"""Of subfolders that are looked at for checkpoints: as in RUN/MODEL/SEED/step-100."""
_T = TypeVar("_T")
_MOST_SHOWN = 12
_WEIGHTS = ("model_weights.ckpt", "model_weights")
"""What NeMo 1.7 to 2.6 packs as a tar: one file, or torch_dist for Megatron-core's models."""


class Candidate(Struct, frozen=True):
    """A place that is a checkpoint of a known format by its names and first bytes.

    ``beside`` are files of the requested folder, which holds only this checkpoint, outside of it;
    ``unlisted`` says what could not be listed in either. ``user_file`` is the one of several that
    was requested, if this is the whole, or the one of several sets, that it is a part of.
    """

    path: Location
    source: Files
    format: Format
    beside: tuple[str, ...] = ()
    unlisted_beside: Mapping[str, Problem] = field(default_factory=dict)
    user_file: str | None = None

    @property
    def unlisted(self) -> dict[str, Problem]:
        return {**self.source.unlisted, **self.unlisted_beside}

    def detect_below(self, folder: str) -> Format | None:
        """Return the format of a folder of the source, if that is a checkpoint by itself."""
        return detect_folder(self.source.narrowed(folder))


def detect_checkpoint(path: Location, format_name: str | None = None) -> Candidate:
    """Find the checkpoint that a path refers to, or treat the path as ``format_name``.

    Raises NotFound, Unrecognized (saying what is there), or UsageError for an unknown format.
    """
    require_there(path)
    return run_bounded(path, lambda: _detect(path, format_name))


def find_checkpoints(path: Location, source: Files) -> tuple[bool, list[Location]]:
    """Return whether a folder is a checkpoint as a whole, and the paths of those below it.

    ``source`` are its files. Includes paths that cannot, or can no longer, be read: reading them
    raises.
    """
    failed: list[Location] = []
    whole = run_bounded(path, lambda: _try_detect(path, lambda: detect_folder(source), []))
    candidates = run_bounded(path, lambda: list(_candidates(path, source, failed)))
    paths = [*(candidate.path for candidate in candidates), *failed]
    problems = [p for p in unlisted_problems(source.unlisted) if p.code != "file-changed"]
    unreadable = [path / problem.file for problem in problems if problem.file is not None]
    paths += [p for p in unreadable if p not in paths and set(p.parents).isdisjoint(paths)]
    return whole is not None, paths


def holds_checkpoint(path: Location) -> bool:
    """Return whether a path refers to one checkpoint of a known format, complete or not."""
    try:
        detect_checkpoint(path)
    except (CkptoolError, OSError):
        return False
    return True


def _detect(path: Location, format_name: str | None) -> Candidate:
    if format_name is not None:
        require_known(format_name)
        source = folder_at(path) if path.is_dir() else file_at(path)
        archive = archive_in(source, path)
        inside = None if archive is None else _detect_in_archive(path, archive)
        return Candidate(path, inside.source if inside else source, FORMATS[format_name])
    if path.is_dir():
        return _detect_in_folder(path)
    return _detect_from_file(path)


def require_known(format_name: str | None) -> None:
    """Raise UsageError if no format has this name."""
    if format_name is not None and format_name not in FORMATS:
        hint = one_of(format_name, FORMATS)
        raise UsageError(f"--from {format_name!r}: unknown format", hint=hint)


def _detect_from_file(path: Location) -> Candidate:
    """Detect the checkpoint that a file is part of, or the file by itself."""
    around = _folder_around(path) if on_disk(path) or _is_part(path.name) else None
    if around is not None and (whole := _find_enclosing(path, around)):
        return whole
    source = file_at(path)
    archive = archive_in(source, path)
    if archive is not None:
        inside = _detect_in_archive(path, archive)
        if inside is None:
            what = f"a NeMo archive without one of {', '.join(_WEIGHTS)} at its top"
            hint = f"tar -xf {path} -C FOLDER, then run ckptool on a part of FOLDER"
            raise Unrecognized(f"{path}: {what}: {list_some(list(archive.files))}", hint=hint)
        return inside
    single = _detect_alone(source, path.name, lambda row: around is None or row.matches(around))
    if single is not None:
        return Candidate(path, source, single)
    if not source.files[path.name]:
        raise Unrecognized(f"{path}: the file is empty (0 bytes)")
    disk = on_disk(path)
    for folder in disk.absolute().parents[:2] if disk else ():
        require_packed(folder.resolve(), os.listdir(folder))  # data/0 is in a folder of its own
    head = read_head(source, path.name)
    kind = detect_kind(head, path.name)
    if kind is not None:
        raise Unrecognized(f"{path}: {kind.what}", hint=kind.hint_for(str(path)))
    raise Unrecognized(
        f"{path}: unknown checkpoint format (begins with {head[:8].hex(' ')})",
        hint="run `ckptool formats` to list known formats; use --from FORMAT to force one",
    )


def _detect_in_archive(path: Location, archive: PlacedFiles) -> Candidate | None:
    """Return the model at the top level of an archive; None if there is none."""
    models = [c for c in _candidates(path, archive) if str(within(c.path, path)) in _WEIGHTS]
    if len(models) != 1:
        return None
    inner = str(within(models[0].path, path))
    rest = (n for n in archive.files if n != inner and not n.startswith(f"{inner}/"))
    return replace(models[0], path=path, beside=tuple(f"{path.name}/{name}" for name in rest))


def _folder_around(path: Location) -> Files | None:
    """Return the folder of a file, with only the near files if it may be a checkpoint alone.

    What lies far below is no part of it, and may be a home folder's millions of files.
    """
    near = _near(path)
    try:
        return LocalSource.folder(near.parent, near=True) if near else folder_at(path.parent)
    except NotFound:
        return None


def _near(path: Location) -> Path | None:
    return on_disk(path) if path.name.endswith(tuple(single_file_suffixes())) else None


def _find_enclosing(path: Location, folder: Files) -> Candidate | None:
    """Find the checkpoint in the file's folder that the file is only a part of."""
    whole = _find_in_folder_of(path, folder)
    singles = single_file_suffixes().values()
    names = {name for row in singles for name in (row.name, row.detection.folder)}
    if whole is None or not _near(path) or (whole.user_file is None and whole.format.name in names):
        return whole
    return _find_in_folder_of(path, folder_at(path.parent))


def _find_in_folder_of(path: Location, folder: Files) -> Candidate | None:
    """Return the checkpoint that a file of a folder is a part of, or all of; None if neither."""
    whole = _LAST_FOLDER.detect(folder)
    rows = [row for row in FORMATS.values() if row.detection.has_set(folder, path.name)]
    whole_files = _files_of(whole, folder) if rows and whole else None
    if rows and (whole_files is None or path.name not in whole_files[0]):
        return Candidate(path, folder, rows[0], user_file=path.name)
    if whole is None:
        return None
    if _is_part(path.name):
        name = path.name if _role_of(path.name) is FileRole.ITEMS else None
        return Candidate(path.parent, folder, whole, user_file=name)
    other_saves = whole.detection.other_saves(folder, path.name)
    if other_saves and (disk := on_disk(path)):
        folder, whole_files = LocalSource.folder(disk.parent, without=other_saves), None
    single = detect(file_at(path))
    # without a number it is no rank's and no shard's, such as optimizer.bin of accelerate
    is_whole = single is not None and not re.search("[0-9]", path.name)
    if is_whole and single is whole and not path.name.endswith(tuple(single_file_suffixes())):
        return Candidate(path.parent, folder, whole)  # it says what the others are, and no more
    is_readable = is_whole or (single is not None and bool(single.detection.suffixes))
    rest = (row for row in FORMATS.values() if row is not whole and row.matches(folder))
    for row in (whole, *(() if is_readable else rest)):
        row_files = whole_files if whole_files and row is whole else _files_of(row, folder)
        if row_files is None:
            return None if is_readable else Candidate(path.parent, folder, row)
        files, is_sound = row_files
        if path.name not in files:
            continue
        if {file for file in files if not (file.endswith(EXTRA) or _is_part(file))} == {path.name}:
            return Candidate(path.parent, folder, row)
        stays = is_whole or (is_readable and not is_sound)
        return None if stays else Candidate(path.parent, folder, row, user_file=path.name)
    return None


def _is_part(name: str) -> bool:
    """Return whether a file name says that the file is only a part of a checkpoint."""
    return _role_of(name) in (FileRole.METADATA, FileRole.ITEMS, FileRole.INDEX)


def _role_of(name: str) -> FileRole | None:
    rule = file_rule(None, name)
    return None if rule is None else rule.role


def _files_of(row: Format, source: Files) -> tuple[frozenset[str], bool] | None:
    """Return the files of a checkpoint, and whether all can be read; None if they are unknown."""
    problems: list[Problem] = []
    try:
        files = row.scan(source, ScanOptions(per_rank=True, problems=problems)).files
    except CkptoolError:
        return None
    return frozenset(files), not problems


def _detect_in_folder(path: Location) -> Candidate:
    source = folder_at(path)
    whole = detect_folder(source)
    if whole is not None:
        return Candidate(path, source, whole)
    require_finished(source)
    return _detect_below(path, source)


def _detect_below(path: Location, source: Files) -> Candidate:
    """Find the checkpoint below a folder: the latest, if that is noted, or the only one."""
    latest = latest_folder(source)
    if latest is not None:
        inner = _detect_in_folder(path / latest)
        names = (name for name in source.files if "/" not in name)
        return replace(inner, beside=(*inner.beside, *names))
    candidates = list(_candidates(path, source))
    if len(candidates) == 1:
        return _with_beside(candidates[0], path, source)
    if candidates:
        raise _several(path, candidates)
    require_listed(unlisted_problems(source.unlisted))
    require_packed(path.resolve(), source.files)
    raise nothing_found(path, folder_of(path), source, names_in(path))


def _with_beside(child: Candidate, path: Location, source: Files) -> Candidate:
    """Add to the only candidate below a folder those files of the folder that are not its own."""
    inner = "/".join(within(child.path, path).parts)
    files = {f"{inner}/{name}" for name in child.source.files} if child.path.is_dir() else {inner}
    files |= {inner.removesuffix(".safetensors") + EXTRA}
    neighbours = tuple(name for name in source.files if name not in files)
    unlisted = {n: why for n, why in source.unlisted.items() if not n.startswith(f"{inner}/")}
    return replace(child, beside=(*child.beside, *neighbours), unlisted_beside=unlisted)


def detect_folder(source: Files) -> Format | None:
    """Return the format of a folder as a whole; None if it only has a single-file checkpoint."""
    if len(source.files) == 1 and "/" not in next(iter(source.files)):
        dcp = FORMATS["dcp"]
        return dcp if dcp.matches(source) else None
    row = detect(source)
    if row is None or not row.detection.suffixes:
        return row
    return None if len(source.files) == 1 or row.detection.folder is not None else row


class _LastFolder:
    """Remembers what the folder of the last file is, until it changes: many files may be in it."""

    def __init__(self) -> None:
        self._last: tuple[tuple[str, str], Format | None] | None = None

    def detect(self, folder: Files) -> Format | None:
        """Return what ``detect_folder`` does."""
        listed, last = (folder.root, folder.fingerprint(folder.files, exact=True)), self._last
        if last is None or last[0] != listed:
            last = self._last = listed, detect_folder(folder)
        return last[1]


_LAST_FOLDER = _LastFolder()


def _try_detect(
    path: Location, detect_it: Callable[[], _T | None], failed: list[Location] | None
) -> _T | None:
    """Return what is detected at a path; on failure None, with the path in ``failed``."""
    try:
        return detect_it()
    except CkptoolError:
        if failed is None:
            raise
        failed.append(path)
        return None


def _candidates(
    path: Location, source: Files, failed: list[Location] | None = None
) -> Iterator[Candidate]:
    """Yield the checkpoints below a folder: subfolders and single files.

    Paths that cannot be read are added to ``failed``, if given.
    """
    folders = source.subfolders()
    covered: set[str] = set()
    has_set = cache(lambda folder, row: row.matches(folders.get(folder, source)))
    larger = cache(lambda: larger_names(source))
    for folder in sorted(folders, key=lambda name: (name.count("/"), natural_key(name))):
        if folder.count("/") >= _LEVELS or lies_in(folder, covered):
            continue
        inner = folders[folder]
        row = _try_detect(path / folder, partial(detect_folder, inner), failed)
        if row is not None or unfinished_problem(inner) or path / folder in (failed or ()):
            covered.add(folder)
        if row is not None:
            yield Candidate(path / folder, inner, row)
    suffixes = (ARCHIVE, *single_file_suffixes())
    for name in source.files:
        # by the name first: beside a run may lie a hundred thousand pictures
        may_be = name.endswith(suffixes) or has_no_suffix(name)
        if may_be and not lies_in(name, covered):
            of_one = partial(_single_file, path, source, name, has_set)
            file = _try_detect(path / name, of_one, failed)
            if file is not None and not holds_counts_alone(source, name, larger):
                yield file


def _detect_alone(source: Files, name: str, has_set: Callable[[Format], bool]) -> Format | None:
    """Return the format of a file by itself: of a rank's only if its folder has a set of them."""
    row, singles = detect(source), single_file_suffixes()
    is_whole = row is None or row.detection.suffixes or has_set(row)
    return row if is_whole else next((singles[s] for s in singles if name.endswith(s)), row)


def _single_file(
    path: Location, source: Files, name: str, has_set: Callable[[str, Format], bool]
) -> Candidate | None:
    is_side = name.endswith(EXTRA) and name.removesuffix(EXTRA) + ".safetensors" in source.files
    if is_side or (has_no_suffix(name) and not is_unnamed_torch(source, name)):
        return None
    file = source.alone(name)
    archive = archive_in(file, path / name)
    if archive is not None:
        return _detect_in_archive(path / name, archive)
    row = _detect_alone(file, name, partial(has_set, name.rpartition("/")[0]))
    return None if row is None else Candidate(path / name, file, row)


def _several(path: Location, candidates: list[Candidate]) -> Several:
    candidates.sort(key=lambda candidate: natural_key(str(candidate.path)), reverse=True)
    shown = [f"  {one.path}  ({one.format.name})" for one in candidates[:_MOST_SHOWN]]
    more = len(candidates) - len(shown)
    listed = shown + ([f"  ... and {more} earlier"] if more else [])
    return Several(
        f"{path}: contains {len(candidates)} checkpoints:\n" + "\n".join(listed),
        hint=f"pass one of them, for example {candidates[0].path}; `ckptool {path}` says which are"
        f" complete; `ckptool verify {path} --latest-good` finds the newest good one",
    )
