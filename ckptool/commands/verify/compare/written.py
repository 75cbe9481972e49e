"""Whether what was written is what was read: the source against the output, as it lies there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptool.commands.options.verify import CompareOptions
from ckptool.commands.verify.compare.tensors import compare, differing_tensor
from ckptool.core.catalog import TensorEntry, tied_names
from ckptool.core.layout import FileLayout, written_entries
from ckptool.core.plan import Plan
from ckptool.core.text import plural
from ckptool.core.views import narrow
from ckptool.engine.check.pairs import TensorPair
from ckptool.engine.check.replicas import differing_replicas
from ckptool.engine.check.rest import differing_rest
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.read.tiles import Progress
from ckptool.errors import NotVerified, SourceError
from ckptool.storage.local import Files


def require_written(
    plan: Plan,
    share: Sequence[TensorEntry],
    sides: tuple[Files, Files],
    workers: int,
    progress: Progress,
) -> None:
    """Compare a ``share`` of the plan's tensors in the output with the source, bit by bit.

    ``sides`` are the files of the source and of the output. The elements of the source are those to
    be written: renamed, cast and dequantized. Neither side is read by the tiles of the plan, but
    row by row, where its own description says that a row lies. Raises NotVerified where the
    output is not what it should be, and what reading the source raises.
    """
    share = [_kept_rows(plan, entry) for entry in share]
    written = written_entries(plan.layout, {entry.name: entry for entry in share})
    missing = _missing(plan, [entry for entry in share if entry.name not in written])
    if missing:
        raise _not_verified(f"{plural(len(missing), 'tensor')} not written, first {missing[0]}")
    pairs = [TensorPair(entry, written[entry.name]) for entry in share if entry.name in written]
    reads = TensorSource(sides[0]), TensorSource(sides[1])
    found = compare(pairs, reads, CompareOptions(), workers, progress)
    unreadable = (pair.one.name for pair in pairs if pair.one.name in found.unreadable)
    for name in unreadable:  # in the order of the tensors, not that in which threads came to them
        side, error = found.unreadable[name]
        if side == 1 and isinstance(error, SourceError):
            raise _not_verified(f"{name} cannot be read back: {error.message}") from error
        raise error
    differing = [pair for pair in pairs if pair.one.name in found.differences]
    if differing:
        first = differing_tensor(differing[0], found.differences[differing[0].one.name])
        count = f"{len(differing):,} of {plural(len(pairs), 'tensor')}"
        raise _not_verified(f"{count} differ between source (A) and output (B): {first.problem}")
    copies = differing_replicas(written.values(), sides[1], workers)
    if copies:
        raise _not_verified(f"{plural(len(copies), 'replica')} differ after writing: {copies[0]}")


def require_rest(files: Iterable[FileLayout], source: Files, folder: Path) -> None:
    """Compare what is no tensor in files that are staged with what was to be written.

    Raises NotVerified where it is not that, and what reading the source raises.
    """
    differing = differing_rest(files, source, folder)
    if differing is not None:
        raise _not_verified(differing)


def _missing(plan: Plan, unwritten: Sequence[TensorEntry]) -> list[str]:
    """Return the names of those that are not in the output, and should be.

    Of tied tensors a layout may store one, and none of a tensor without elements.
    """
    names = {entry.name for entry in unwritten if entry.elements}
    if not names:
        return []
    groups = [tied for tied in tied_names(plan.catalog) if not names.isdisjoint(tied)]
    others = {n: plan.catalog.tensors[n] for tied in groups for n in tied if n not in names}
    stored = written_entries(plan.layout, others) if others else {}
    names -= {n for tied in groups if not stored.keys().isdisjoint(tied) for n in tied}
    return [entry.name for entry in unwritten if entry.name in names]


def _kept_rows(plan: Plan, entry: TensorEntry) -> TensorEntry:
    rows = plan.layout.rows.get(entry.name)
    return entry if rows is None else narrow(entry, 0, 0, rows)


def _not_verified(what: str) -> NotVerified:
    return NotVerified(f"verification failed: {what}")
