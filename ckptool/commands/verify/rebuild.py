"""The catalog of a damaged checkpoint: what a scan could read, or what data files say alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckptool.commands.open import Survey
from ckptool.commands.read_options import ReadOptions
from ckptool.commands.verify.mended import Mended, mended
from ckptool.core.catalog import Catalog
from ckptool.core.unstack import unstacked
from ckptool.engine.sources import Files
from ckptool.errors import CannotDo, CkptoolError, Problem
from ckptool.formats import FORMATS
from ckptool.formats._dcp_rebuild import rebuilt
from ckptool.formats.base import ScanOptions

_METADATA = ".metadata"
_UNCOMMITTED = ".metadata.tmp"
_UNNAMED = (
    "names: .metadata alone holds them; each item is called after its file and place in it",
    "which items are chunks of one tensor, where in it they belong, and its shape",
    "whether files were lost: nothing else says how many there were",
)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What is left to work with. ``unknown`` says what no file tells any more."""

    catalog: Catalog
    problems: tuple[Problem, ...]
    unknown: tuple[str, ...] = ()


def rebuild(found: Survey, options: ReadOptions) -> Rebuilt:
    """The catalog of what was surveyed, cut files included.

    Where that is none: of a DCP folder without ``.metadata`` from its data files. Raises CannotDo
    where nothing can be read.
    """
    longer = mended(found.source)
    again = _scanned_again(found, longer, options) if longer is not None else None
    if again is not None:
        return again
    if found.catalog is not None:
        unknown = (*_unrecorded(found.catalog), *_unseen(found, found.problems))
        return Rebuilt(found.catalog, found.problems, unknown)
    if found.format.name == "dcp":
        return _from_uncommitted(found) or _from_items(found)
    raise CannotDo(
        f"{found.path}: nothing of it can be read: {found.problems[0]}",
        hint="ckptool verify lists what is wrong with it",
    )


def _scanned_again(found: Survey, longer: Mended, options: ReadOptions) -> Rebuilt | None:
    """With the files that were cut as long as they should be; what is lost shows when read."""
    problems: list[Problem] = []
    asked = options.scan_options(found.format, problems)
    try:
        catalog = found.format.scan(longer.source, asked)
    except CkptoolError:
        return None
    catalog = unstacked(catalog) if options.unstack else catalog
    files = {name: found.source.files[name] for name in catalog.files}
    catalog = replace(catalog, files=files)
    unknown = (*_unrecorded(catalog), *_unseen(found, problems))
    return Rebuilt(catalog, (*longer.problems, *problems), unknown)


def _unrecorded(catalog: Catalog) -> tuple[str, ...]:
    notes = [note for note in catalog.notes if isinstance(note, Problem)]
    return tuple(str(note) for note in notes if note.code == "world-unrecorded")


def _unseen(found: Survey, problems: Iterable[Problem]) -> tuple[str, ...]:
    """What may have lain in files that cannot be read, where those files alone said so."""
    if found.format.name == "dcp" and _METADATA in found.source.files:
        return ()
    files = dict.fromkeys(one.file for one in problems if one.file and not one.tensor)
    return tuple(f"what lay in {file} alone" for file in files)


class _Renamed:
    """A source whose uncommitted metadata stands in for the metadata it was to become."""

    def __init__(self, source: Files) -> None:
        self._source = source
        self.root = source.root
        self.files: Mapping[str, int] = {
            _METADATA if name == _UNCOMMITTED else name: size for name, size in source.files.items()
        }

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """As the source reads."""
        return self._source.read(_UNCOMMITTED if file == _METADATA else file, offset, nbytes)

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Not told: only metadata is read."""

    def narrowed(self, folder: str) -> Files:
        """As the source narrows."""
        return self._source.narrowed(folder)


def _from_uncommitted(found: Survey) -> Rebuilt | None:
    """By the metadata that was written and never renamed, where it is whole."""
    if _UNCOMMITTED not in found.source.files or _METADATA in found.source.files:
        return None
    problems: list[Problem] = []
    try:
        source, options = _Renamed(found.source), ScanOptions(found=problems)
        catalog = FORMATS["dcp"].scan(source, options)
    except CkptoolError:
        return None
    files = {name: size for name, size in catalog.files.items() if name != _METADATA}
    catalog = replace(catalog, files=files)
    return Rebuilt(catalog, (*found.problems, *problems), _unrecorded(catalog))


def _from_items(found: Survey) -> Rebuilt:
    """By the items of the data files."""
    catalog, problems = rebuilt(found.source)
    return Rebuilt(catalog, (*found.problems, *problems), _UNNAMED)
