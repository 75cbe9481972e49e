"""What --overwrite replaces: the files of the old checkpoint, and nothing that lies beside them.

Which files these are is read from the old checkpoint itself: those that its catalog names, and
those that go with a model where the new one brings its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ckptool.commands.detect import bounded, file_at, folder_at
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Verbatim
from ckptool.engine.write.existing import kept_entries
from ckptool.engine.write.run import verbatim
from ckptool.engine.write.writer import UNFINISHED
from ckptool.errors import CkptoolError, Problem, TransferError, Unsupported
from ckptool.formats import detect
from ckptool.formats.base import Format, ScanOptions
from ckptool.formats.companions import MEGATRON, RELEASE, is_of_model, latest_folder
from ckptool.serialization.source import Source
from ckptool.storage.commit_note import side_name
from ckptool.storage.local import Files, LocalSource
from ckptool.storage.url import Location

_LARGEST_TEXT = 64 << 20
_UNFINISHED = (".metadata", ".metadata.tmp", ".distcp")
_SCAN = ScanOptions(per_rank=True, values=False)


def own_files(target: Location, layout: Layout, new: Files) -> frozenset[str] | None:
    """The files of the checkpoint at a target that ``layout`` would replace, relative to it.

    ``new`` is the source of what is to be written. Of a file that is the file itself and what
    ckptool put beside it. None where there is no checkpoint; Unsupported where it cannot be told
    which files belong to it.
    """
    if not layout.folder:
        return _own_beside(target)
    if not target.is_dir():
        return None
    try:
        source = folder_at(target)
        found = detect(source)
        own = _files_of_release(target, source, layout)
        if found is not None:
            own = _files_of(target, source, found, layout)
        if own is None:
            return None
        own |= _unchanged(source, layout, new)
    except Unsupported:
        raise
    except (CkptoolError, OSError) as error:
        raise _unknown(target, error) from None
    return _without_linked(target, own) if isinstance(target, Path) else own


def kept_note(target: Location, layout: Layout, new: Files) -> str | None:
    """What stays at a target that is replaced; None where nothing does."""
    if not layout.folder or not target.is_dir():
        return None
    own = own_files(target, layout, new)
    if own is None:
        return None
    if isinstance(target, Path):
        kept = kept_entries(target, own)
    else:
        files = folder_at(target).files
        others = [] if UNFINISHED in files else [name for name in files if name not in own]
        kept = sorted({name.partition("/")[0] for name in others})
    if not kept:
        return None
    more = f", and {len(kept) - 12} more" if len(kept) > 12 else ""
    return f"{target}: kept, not part of the old checkpoint: {', '.join(kept[:12])}{more}"


def require_unmixed(target: Path, staged: Path, own: Iterable[str]) -> None:
    """TransferError where what stays at a target would be read as part of the new checkpoint."""
    names = frozenset(own)
    there = LocalSource.folder(target)
    kept = {name: size for name, size in there.files.items() if name not in names}
    if not kept:
        return
    alone = LocalSource.folder(staged)
    mixed = _Mixed(alone, LocalSource(target, kept))
    taken = _taken_for_parts(target, alone, mixed)
    if taken:
        more = f", and {len(taken) - 8} more" if len(taken) > 8 else ""
        raise TransferError(
            f"{target}: {', '.join(taken[:8])}{more}: not part of the old checkpoint, but"
            " would be read as part of the new one",
            hint="move it away, then run the same command with --resume",
        )


def _taken_for_parts(target: Path, alone: LocalSource, mixed: _Mixed) -> list[str]:
    """The files beside the new checkpoint that would be read with it, or in its stead."""
    new, found = detect(alone), detect(mixed)
    if new is None or found is None:
        return [] if new is found else sorted(mixed.kept.files)
    if new is not found:
        return sorted(mixed.kept.files)
    try:
        expected = bounded(target, lambda: new.scan(alone, _SCAN))
    except CkptoolError:
        return []
    try:
        read = bounded(target, lambda: new.scan(mixed, _SCAN))
    except CkptoolError:
        return sorted(mixed.kept.files)
    return sorted(read.files.keys() - expected.files.keys())


class _Mixed:
    """The files of the new checkpoint, and those that would lie beside it."""

    def __init__(self, new: LocalSource, kept: LocalSource) -> None:
        self.root = kept.root
        self.kept = kept
        self.files = dict(sorted({**kept.files, **new.files}.items()))
        self._new = new

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` at ``offset``; Damaged where the file ends before."""
        source = self._new if file in self._new.files else self.kept
        return source.read(file, offset, nbytes)

    def narrowed(self, folder: str) -> _Mixed:
        """The part below a subfolder, as a source of its own."""
        return _Mixed(self._new.narrowed(folder), self.kept.narrowed(folder))

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """A disk needs no notice."""


def _own_beside(target: Location) -> frozenset[str] | None:
    """The file at a target and its side file, as far as they are a checkpoint's."""
    side = side_name(target.name)
    places = [target] if side is None else [target, target.with_name(side)]
    return frozenset(place.name for place in places if _is_own_file(place))


def _is_own_file(place: Location) -> bool:
    """Whether a checkpoint's file may be replaced: itself, a link to whatever, or an empty file."""
    try:
        if isinstance(place, Path) and place.is_symlink():
            return True
        source: Source = file_at(place)
        return not source.files.get(place.name, 1) or detect(source) is not None
    except (CkptoolError, OSError):
        return False


def _files_of(target: Location, source: Files, found: Format, layout: Layout) -> frozenset[str]:
    try:
        catalog = bounded(target, lambda: found.scan(source, _SCAN))
    except CkptoolError:
        return _named_files(target, source, found)
    return frozenset(catalog.files) | _replaced_companions(catalog, layout)


def _named_files(target: Location, source: Files, found: Format) -> frozenset[str]:
    """The files of a checkpoint that cannot be read whole; Unsupported where names do not tell."""
    problems: list[Problem] = []
    options = ScanOptions(per_rank=True, values=False, found=problems)
    try:
        return frozenset(bounded(target, lambda: found.scan(source, options)).files)
    except CkptoolError as error:
        named = frozenset(name for name in source.files if name.endswith(_UNFINISHED))
        if not named:
            raise _unknown(target, error) from None
        return named


def _replaced_companions(catalog: Catalog, layout: Layout) -> frozenset[str]:
    """Files that go with a model, where the new one brings its own."""
    new = {file.path for file in layout.files}
    return frozenset(name for name in catalog.companions if name in new and is_of_model(name))


def _unchanged(source: Files, layout: Layout, new: Files) -> frozenset[str]:
    """Files that the new checkpoint brings along just as they are there."""
    return frozenset(
        file.path
        for file in layout.files
        if file.nbytes == source.files.get(file.path) and _is_same(file, source, new)
    )


def _is_same(file: FileLayout, source: Files, new: Files) -> bool:
    parts = file.parts
    if len(parts) != 1 or not isinstance(parts[0], Verbatim) or file.nbytes > _LARGEST_TEXT:
        return False
    data = b"".join(bytes(piece) for piece in verbatim(parts[0], new))
    return data == source.read(file.path, 0, file.nbytes)


def _files_of_release(target: Location, source: Files, layout: Layout) -> frozenset[str] | None:
    """The files of a run that ckptool wrote for Megatron-LM, whose one checkpoint is a release."""
    folder = latest_folder(source)
    if folder != RELEASE or MEGATRON not in {file.path for file in layout.files}:
        return None
    inner = source.narrowed(folder)
    found = detect(inner)
    if found is None:
        return None
    own = _files_of(target / folder, inner, found, layout)
    beside = {n for n in source.files if "/" not in n and is_of_model(n)}
    new = {file.path for file in layout.files}
    return frozenset(f"{folder}/{name}" for name in own) | {MEGATRON} | (beside & new)


def _without_linked(target: Path, names: frozenset[str]) -> frozenset[str]:
    """The files that lie in the folder itself, not behind a link that leads out of it."""
    folders = {parent for name in names for parent in PurePosixPath(name).parents}
    linked = {str(folder) for folder in folders if (target / folder).is_symlink() and folder.name}
    return frozenset(
        name for name in names if linked.isdisjoint(map(str, PurePosixPath(name).parents))
    )


def _unknown(target: Location, error: Exception) -> Unsupported:
    return Unsupported(
        f"{target}: cannot determine which files belong to the old checkpoint: {error}",
        hint="choose another target or move this one away; ckptool never deletes other files",
    )
