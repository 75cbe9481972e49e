"""From what the user points at to a source, its format and its catalog."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.commands.read_options import AS_DETECTED, ReadOptions
from ckptool.commands.recognise import Candidate, bounded, recognise
from ckptool.core.catalog import Catalog
from ckptool.engine.remote_path import Location
from ckptool.engine.sources import Files
from ckptool.errors import CkptoolError, Problem, Unrecognised, UsageError
from ckptool.formats.base import Format, ScanOptions


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint that was recognised. ``path`` is where it lies, ``catalog`` what it says."""

    path: Location
    source: Files
    format: Format
    catalog: Catalog

    def located(self, catalog: Catalog) -> Catalog:
        """A (rewritten) catalog of this checkpoint with every container opened."""
        locate = self.format.locate
        if locate is None:
            return catalog
        return bounded(self.path, lambda: locate(self.source, catalog))


def open_checkpoint(path: Location, options: ReadOptions = AS_DETECTED) -> Opened:
    """Recognise the checkpoint at ``path`` and scan its metadata.

    ``path`` may be the checkpoint, a file inside it, its parent folder, or a run's folder that
    holds just one. Raises NotFound, Unrecognised (with what is there), Damaged or Hostile.
    """
    found = recognise(path, options.format_name)
    catalog = _scanned(found, options.scan_options(found.format))
    if _is_empty(catalog):
        raise _nothing_in(found.path)
    whole = _taken_apart(catalog, options)
    return Opened(found.path, found.source, found.format, whole)


def _is_empty(catalog: Catalog) -> bool:
    return not (catalog.tensors or catalog.objects or catalog.conflicts)


def _scanned(found: Candidate, options: ScanOptions) -> Catalog:
    return bounded(found.path, lambda: found.format.scan(found.source, options))


@dataclass(frozen=True, slots=True)
class Survey:
    """What could be read of a checkpoint, whole or not.

    ``catalog`` is None where nothing could be put together; ``problems`` say why, and what was
    stepped over.
    """

    path: Location
    source: Files
    format: Format
    catalog: Catalog | None
    problems: tuple[Problem, ...]


def survey(path: Location, options: ReadOptions = AS_DETECTED) -> Survey:
    """Recognise the checkpoint at ``path`` and read what can be read of it.

    Raises NotFound or Unrecognised where there is none, UsageError where it cannot be read as
    asked, and nothing for damage.
    """
    found = recognise(path, options.format_name)
    problems: list[Problem] = []
    asked = options.scan_options(found.format, problems)
    catalog = None
    try:
        catalog = _scanned(found, asked)
    except (Unrecognised, UsageError):
        raise
    except CkptoolError as error:
        problems += error.problems
    if not problems and (catalog is None or _is_empty(catalog)):
        raise _nothing_in(found.path)
    whole = None if catalog is None else _taken_apart(catalog, options)
    return Survey(found.path, found.source, found.format, whole, tuple(problems))


def _taken_apart(catalog: Catalog, options: ReadOptions) -> Catalog:
    """The catalog, with a tensor for each layer and expert where that is asked for."""
    if not options.unstack:
        return catalog
    from ckptool.core.unstack import unstacked

    return unstacked(catalog)


def _nothing_in(path: Location) -> Unrecognised:
    return Unrecognised(f"{path}: no tensor and no value in it")
