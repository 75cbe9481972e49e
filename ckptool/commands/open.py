"""Open a checkpoint: from the user's path to a source, its format and its catalog."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.detect import Candidate, detect_checkpoint
from ckptool.commands.options.files import flat_param_shapes
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.unread_files import (
    explain_damage,
    require_listed,
    unlisted_notes,
    unlisted_problems,
    unread_files,
    with_cause,
)
from ckptool.core.catalog import Catalog
from ckptool.core.state_category import with_parts
from ckptool.errors import (
    UNREAD,
    CkptoolError,
    Damaged,
    NoAnswer,
    Problem,
    Refusal,
    Unrecognized,
    Unsupported,
    UsageError,
    damaged,
    refused,
)
from ckptool.formats.base import DELTA, Format, ScanOptions
from ckptool.serialization.safetensors import SafetensorsFile
from ckptool.storage.commit_note import require_finished, unfinished_problem
from ckptool.storage.files import Files
from ckptool.storage.place import run_bounded
from ckptool.storage.url import Location

PART_NAMED = "part-named"
"""The code of the note that a file is one of several, all of which are read."""


def scan_options(
    options: ReadOptions,
    row: Format,
    problems: list[Problem] | None = None,
    *,
    placements: bool = True,
) -> ScanOptions:
    """Return the options that a format's scan takes; UsageError if it lacks one."""
    if options.tp_rules and not row.reading.takes_tp_rules:
        raise UsageError(
            f"--tp-rule: not applicable, {row.name} needs no rule to join tensors",
            hint="leave it out",
        )
    if options.world_size is not None and not row.reading.takes_world_size:
        raise UsageError(
            f"--world-size: not applicable, {row.name} does without the number of ranks",
            hint="leave it out",
        )
    shapes = flat_param_shapes(options.flat_params) if options.flat_params else ()
    return ScanOptions(
        options.per_rank,
        shapes,
        options.tp_rules,
        problems,
        options.values,
        options.world_size,
        placements=placements,
    )


class Opens(Enum):
    """When containers are opened: at once, or late, by whoever reads their elements.

    Those of a disk need not be opened by all if several processes have a share each; in a store
    each would cost requests of its own.
    """

    AT_ONCE = auto()
    LATE_IN_STORES = auto()
    LATE = auto()


class OpenedCheckpoint(Struct, frozen=True):
    """A checkpoint that was detected: ``path`` is its place, ``catalog`` its contents."""

    path: Location
    source: Files
    format: Format
    catalog: Catalog

    def open_containers(self, catalog: Catalog, opens: Opens = Opens.AT_ONCE) -> Catalog:
        """Open every container of a (rewritten) catalog of this checkpoint.

        Those that are opened late may get an opening instead.
        """
        locate = self.format.reading.locate
        if locate is None:
            return catalog
        in_store = self.source.policy.by_request
        defers = opens is Opens.LATE or (opens is Opens.LATE_IN_STORES and in_store)
        return run_bounded(self.path, lambda: locate(self.source, catalog, defers=defers))

    def open_tensors(self, catalog: Catalog) -> Catalog:
        """Open the containers of plain tensors, in stores late; Unsupported if one has others."""
        located = self.open_containers(catalog, Opens.LATE_IN_STORES)
        for name in catalog.tensors:
            if name not in located.tensors:
                raise Unsupported(
                    f"{name}: a tensor subclass that wraps others, not a plain tensor",
                    hint="convert gives the tensors in it names of their own",
                )
        return located


@contextmanager
def no_collecting() -> Iterator[None]:
    """Suspend garbage collection: a catalog is millions of objects without cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@no_collecting()
def open_checkpoint(
    path: Location,
    options: ReadOptions = AS_DETECTED,
    *,
    whole: bool = True,
    placements: bool = True,
) -> OpenedCheckpoint:
    """Detect the checkpoint at ``path`` and scan its metadata.

    ``path`` may be the checkpoint, a file inside it, its parent folder, or a run's folder with only
    one. Raises NotFound, Unrecognized (saying what is there), Damaged or Hostile. Tensors of
    unsupported kinds, and unless ``whole`` all that cannot or must not be read, are refusals among
    the catalog's conflicts, for ``require_readable`` to raise once it is known what is wanted.
    ``placements`` says that a mesh is inferred where none is recorded.
    """
    candidate = detect_checkpoint(path, options.from_format)
    path, source = candidate.path, candidate.source
    require_finished(source)
    require_listed(unlisted_problems(candidate.unlisted))
    catalog = _scan(candidate, scan_options(options, candidate.format, placements=placements))
    if _is_empty(catalog):
        raise _no_content(path)
    opened = OpenedCheckpoint(path, source, candidate.format, catalog)
    if whole:
        require_sound(opened, catalog)
    return replace(opened, catalog=_with_parts(catalog, options))


def require_sound(opened: OpenedCheckpoint, subset: Catalog) -> None:
    """Raise for the refusals in a ``subset`` of a checkpoint: Hostile for code, else Damaged.

    Tensors of unsupported kinds stay among the conflicts.
    """
    reasons = subset.conflicts.values()
    if unsound := [w for w in reasons if isinstance(w, Refusal) and w.code != UNREAD]:
        error = refused(unsound, subject=str(opened.path))
        raise explain_damage(opened.source, error) if isinstance(error, Damaged) else error


def require_readable(opened: OpenedCheckpoint, subset: Catalog) -> None:
    """Raise Unsupported, too, for tensors of unsupported kinds."""
    require_sound(opened, subset)
    if unread := [why for why in subset.conflicts.values() if isinstance(why, Refusal)]:
        raise refused(unread, subject=str(opened.path))


def require_agreement(opened: OpenedCheckpoint, subset: Catalog) -> None:
    """Raise Damaged, too, if ranks contradict one another on something in the ``subset``.

    Raises Unsupported if everything missing was excluded when the checkpoint was saved.
    """
    require_readable(opened, subset)
    reasons = subset.conflicts.values()
    codes = {why.code if isinstance(why, Problem) else "" for why in reasons}
    if codes == {"frozen-excluded"}:
        raise Unsupported(
            "; ".join(reasons),
            hint=f"`ckptool convert --drop {next(iter(subset.conflicts))}` converts the rest",
        )
    if subset.conflicts:
        raise damaged(
            list(reasons),
            subject="the ranks' files",
            hint="--per-rank keeps each as NAME@rankR; --drop 'NAME' excludes them; if the"
            " files are separate checkpoints, name one with --from torch-save",
        )


def require_writable(opened: OpenedCheckpoint, subset: Catalog) -> None:
    """Raise Unsupported, too, if the checkpoint is a weight delta, so that nothing is written."""
    require_agreement(opened, subset)
    if DELTA in opened.catalog.info:
        from ckptool.formats.safetensors import require_weights

        require_weights(opened.catalog, str(opened.path))


def _is_empty(catalog: Catalog) -> bool:
    """Return whether nothing is there; a weight delta that changes nothing is something."""
    return not (catalog.tensors or catalog.objects or catalog.conflicts or DELTA in catalog.info)


def _scan(candidate: Candidate, options: ScanOptions) -> Catalog:
    """Scan a checkpoint, with a note on each file beside it that looks like part of one."""
    path, source = candidate.path, candidate.source
    options = replace(options, user_file=_set_named(candidate))
    try:
        catalog = run_bounded(path, lambda: candidate.format.scan(source, options))
    except Damaged as error:
        raise explain_damage(source, error) from None
    unread = run_bounded(path, lambda: unread_files(candidate, catalog, options.problems or ()))
    links = unlisted_notes(candidate.unlisted)
    part_notes = _named_notes(candidate.user_file, catalog)
    return replace(catalog, notes=(*part_notes, *catalog.notes, *unread, *links))


def _set_named(candidate: Candidate) -> str | None:
    """Return the file by which one of several sets in a folder was named, which alone is read."""
    name = candidate.user_file
    is_of_set = name is not None and candidate.format.detection.has_set(candidate.source, name)
    return name if is_of_set else None


def _named_notes(name: str | None, catalog: Catalog) -> Iterator[Problem]:
    """Yield a note that more is read than the file that was named: all that it is a part of."""
    if name is not None:
        message = f"{name} is one of {len(catalog.files):,} files, which are read together"
        yield Problem(message, PART_NAMED, file=name)


class Survey(Struct, frozen=True):
    """What could be read of a checkpoint, complete or not.

    ``catalog`` is None if nothing could be assembled; ``problems`` say why, and what was skipped.
    ``headers`` are those of safetensors files that were read whole, by file. ``user_file`` is as in
    ``ScanOptions``.
    """

    path: Location
    source: Files
    format: Format
    catalog: Catalog | None
    problems: tuple[Problem, ...]
    user_file: str | None = None
    headers: dict[str, SafetensorsFile] = field(default_factory=dict)

    @property
    def opened(self) -> OpenedCheckpoint | None:
        """The checkpoint as far as it could be read; None if that is not at all."""
        if self.catalog is None:
            return None
        return OpenedCheckpoint(self.path, self.source, self.format, self.catalog)


def survey(path: Location, options: ReadOptions = AS_DETECTED) -> Survey:
    """Detect the checkpoint at ``path`` and read what is readable of it.

    Raises NotFound or Unrecognized if there is none, UsageError if it cannot be read as requested.
    Damage does not raise. A mesh is inferred for verify, too: chunks whose places were exchanged
    fit none, and nothing else shows them.
    """
    candidate = detect_checkpoint(path, options.from_format)
    source = candidate.source
    problems = [problem] if (problem := unfinished_problem(source)) is not None else []
    problems += unlisted_problems(candidate.unlisted)
    headers = dict[str, SafetensorsFile]()
    scan = replace(scan_options(options, candidate.format, problems), headers=headers)
    catalog = None
    try:
        catalog = _scan(candidate, scan)
    except (Unrecognized, UsageError):
        raise
    except CkptoolError as error:
        problems += error.problems
    if not problems and (catalog is None or _is_empty(catalog)):
        raise _no_content(candidate.path)
    if catalog is not None:
        refusals = {n: why for n, why in catalog.conflicts.items() if isinstance(why, Refusal)}
        problems += [why for why in refusals.values() if not why.derived]
        conflicts = {n: why for n, why in catalog.conflicts.items() if n not in refusals}
        catalog = _with_parts(replace(catalog, conflicts=conflicts), options)
    causes = with_cause(source, problems)
    how = candidate.path, source, candidate.format, catalog, tuple(causes)
    return Survey(*how, user_file=_set_named(candidate), headers=headers)


def survey_readable(path: Location, options: ReadOptions = AS_DETECTED) -> Survey | None:
    """Read what is readable of a checkpoint; None if nothing is. Raises NoAnswer."""
    try:
        return survey(path, options)
    except NoAnswer:
        raise
    except (CkptoolError, OSError):
        return None


def _with_parts(catalog: Catalog, options: ReadOptions) -> Catalog:
    """Set each entry's part, and split stacked layers and experts if requested."""
    catalog = with_parts(catalog)
    if not options.split_stacked:
        return catalog
    from ckptool.core.selection import split_stacked

    return split_stacked(catalog)


def _no_content(path: Location) -> Unrecognized:
    return Unrecognized(f"{path}: contains no tensors or values")
