"""What --overwrite replaces: the files of the old checkpoint, and nothing beside them.

The old checkpoint itself determines these files: those that its catalog names, and those of its
model if the new one brings its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from ckptool.commands.open import Opens
from ckptool.commands.options.target import TransferOptions
from ckptool.core.layout import FileLayout, Layout, Verbatim
from ckptool.core.text import list_some
from ckptool.engine.write.existing import kept_entries
from ckptool.engine.write.run import read_verbatim
from ckptool.errors import CkptoolError, NotFound, Problem, TransferError, Unsupported
from ckptool.formats import detect
from ckptool.formats.base import EXTRA, Format, ScanOptions
from ckptool.formats.companions import MEGATRON, RELEASE, is_of_model, latest_folder
from ckptool.serialization.archive.write import is_written_here
from ckptool.serialization.source import Source
from ckptool.storage.commit_note import UNFINISHED, side_name
from ckptool.storage.files import Files
from ckptool.storage.local import LocalSource
from ckptool.storage.place import file_at, folder_at, on_disk, run_bounded
from ckptool.storage.url import Location
from ckptool.storage.virtual.placed import PlacedFiles, places_in

_LARGEST_TEXT = 64 << 20
"""Bytes of a file that is compared in memory: tokenizers have up to 35 MB."""
_WHOLE = "model.safetensors"
_INDEX = f"{_WHOLE}.index.json"
_UNFINISHED = (".metadata", ".metadata.tmp", ".distcp")
_SCAN = ScanOptions(per_rank=True, values=False)


def own_files(target: Location, layout: Layout, new: Files) -> frozenset[str] | None:
    """Find the files of the checkpoint at a target that ``layout`` would replace, relative to it.

    ``new`` is the source of the new output. For a single file it is that file and ckptool's side
    file. Returns None if there is no checkpoint; raises Unsupported if it is unclear which files
    belong to it.
    """
    if not layout.folder:
        return _own_beside(target)
    if not target.is_dir():
        return None
    try:
        source = folder_at(target)
        row = detect(source)
        names = _files_of_release(target, source, layout)
        if row is not None:
            names = _files_of(target, source, row, layout)
        if names is None:
            return None
        names = frozenset(name for name in names if not _is_foreign_side(source, name))
        names |= _unchanged_files(source, layout, new)
    except Unsupported:
        raise
    except (CkptoolError, OSError) as error:
        raise _unknown(target, error) from None
    path = on_disk(target)
    return names if path is None else _drop_linked(path, names)


def kept_note(target: Location, layout: Layout, new: Files) -> str | None:
    """Return a note on what stays at a replaced target; None if nothing does."""
    if not layout.folder or not target.is_dir():
        return None
    names = own_files(target, layout, new)
    if names is None:
        return None
    if (path := on_disk(target)) is not None:
        entries = kept_entries(path, names)
    else:
        files = folder_at(target).files
        rest = [] if UNFINISHED in files else [name for name in files if name not in names]
        entries = sorted({name.partition("/")[0] for name in rest})
    if not entries:
        return None
    return f"{target}: kept, not part of the old checkpoint: {list_some(entries, 12)}"


def require_unmixed(target: Path, staged: Path, old_files: Iterable[str]) -> None:
    """Raise TransferError if files that stay at a target would be read with the new checkpoint."""
    names = frozenset(old_files)
    old = LocalSource.folder(target)
    rest = {name: size for name, size in old.files.items() if name not in names}
    if not rest:
        return
    output = LocalSource.folder(staged)
    read = _read_with(target, output, LocalSource(target, rest))
    if _INDEX in output.files and _WHOLE in rest and _WHOLE not in output.files:
        read = [_WHOLE]  # which transformers (4, 5) opens before it looks for an index
    if read:
        raise TransferError(
            f"{target}: {list_some(read)}: not part of the old checkpoint, but would be read as"
            " part of the new one",
            hint="move it away, then run the same command with --resume in place of --overwrite",
        )


def _read_with(target: Path, output: LocalSource, rest: LocalSource) -> list[str]:
    """Return the files beside the new checkpoint that would be read with it, or instead of it."""
    places = places_in(rest) | places_in(output)
    union, new = PlacedFiles(rest.root, dict(sorted(places.items()))), detect(output)
    if new is not detect(union):
        return sorted(rest.files)
    if new is None:
        return []
    try:
        expected = run_bounded(target, lambda: new.scan(output, _SCAN))
    except CkptoolError:
        return []
    try:
        read = run_bounded(target, lambda: new.scan(union, _SCAN))
    except CkptoolError:
        return sorted(rest.files)
    return sorted(read.files.keys() - expected.files.keys())


def _own_beside(target: Location) -> frozenset[str] | None:
    """Return the file at a target and its side file, if they are a checkpoint's."""
    names = {target.name} if _is_own_file(target) else set()
    side, is_own = find_side(target)
    return frozenset(names | ({side.name} if side is not None and is_own else set()))


def find_side(file: Location) -> tuple[Location | None, bool]:
    """Return the side file beside a safetensors file, if any, and whether ckptool wrote it."""
    name = side_name(file.name)
    if name is None:
        return None, False
    side = file.with_name(name)
    try:
        source = file_at(side)
    except (NotFound, KeyError):
        return None, False
    return side, is_written_here(source, name)


def _is_foreign_side(source: Source, name: str) -> bool:
    """Return whether a file has the name of a side file, but was not written by ckptool."""
    return name.endswith(EXTRA) and not (name in source.files and is_written_here(source, name))


def _is_own_file(file: Location) -> bool:
    """Return whether a file may be replaced: a checkpoint, any link, or an empty file."""
    try:
        path = on_disk(file)
        if path is not None and path.is_symlink():
            return True
        if path is not None and not path.is_file():
            return False  # a pipe, a device
        source: Source = file_at(file)
        return not source.files.get(file.name, 1) or detect(source) is not None
    except (CkptoolError, OSError):
        return False


def _files_of(target: Location, source: Files, row: Format, layout: Layout) -> frozenset[str]:
    """Return a checkpoint's files, with those of its model if the new one brings its own."""
    try:
        catalog = run_bounded(target, lambda: row.scan(source, _SCAN))
    except CkptoolError:
        return _named_files(target, source, row)
    new = {*layout.sizes}
    companions = (name for name in catalog.companions if name in new and is_of_model(name))
    return frozenset(catalog.files).union(companions)


def _named_files(target: Location, source: Files, row: Format) -> frozenset[str]:
    """Return the files of a partly readable checkpoint; Unsupported if names are missing."""
    problems: list[Problem] = []
    options = replace(_SCAN, problems=problems)
    try:
        return frozenset(run_bounded(target, lambda: row.scan(source, options)).files)
    except CkptoolError as error:
        names = frozenset(name for name in source.files if name.endswith(_UNFINISHED))
        if not names:
            raise _unknown(target, error) from None
        return names


def _unchanged_files(source: Files, layout: Layout, new: Files) -> frozenset[str]:
    """Return the files that are already there exactly as the new checkpoint would write them."""
    return frozenset(
        file.path
        for file in layout.files
        if file.nbytes == source.files.get(file.path) and _is_same(file, source, new)
    )


def _is_same(file: FileLayout, source: Files, new: Files) -> bool:
    parts = file.parts
    if len(parts) != 1 or not isinstance(parts[0], Verbatim) or file.nbytes > _LARGEST_TEXT:
        return False
    data = b"".join(bytes(piece) for piece in read_verbatim(parts[0], new))
    return data == source.read(file.path, 0, file.nbytes)


def _files_of_release(target: Location, source: Files, layout: Layout) -> frozenset[str] | None:
    """Return the files of a run that ckptool wrote for Megatron-LM: its checkpoint is a release."""
    folder = latest_folder(source)
    if folder != RELEASE or MEGATRON not in layout.sizes:
        return None
    inner = source.narrowed(folder)
    row = detect(inner)
    if row is None:
        return None
    files = _files_of(target / folder, inner, row, layout)
    neighbours = {n for n in source.files if "/" not in n and is_of_model(n)}
    new = {*layout.sizes}
    return frozenset(f"{folder}/{name}" for name in files) | {MEGATRON} | (neighbours & new)


def _drop_linked(target: Path, names: frozenset[str]) -> frozenset[str]:
    """Drop the files behind a link that leads out of the folder."""
    folders = {parent for name in names for parent in PurePosixPath(name).parents}
    links = {str(folder) for folder in folders if (target / folder).is_symlink() and folder.name}
    return frozenset(
        name for name in names if links.isdisjoint(map(str, PurePosixPath(name).parents))
    )


def _unknown(target: Location, error: Exception) -> Unsupported:
    return Unsupported(
        f"{target}: cannot determine which files belong to the old checkpoint: {error}",
        hint="choose another target or move this one away; ckptool never deletes other files",
    )


def when_to_open(target: Location, options: TransferOptions, ranks: int) -> Opens:
    """Return when a transfer opens containers: the later, the later damage shows.

    At once if the checkpoint at the target is removed first, as in stores, which cannot rename.
    """
    if options.overwrite and on_disk(target) is None:
        return Opens.AT_ONCE
    return Opens.LATE if options.is_shared(ranks) else Opens.LATE_IN_STORES
