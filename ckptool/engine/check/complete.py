"""Whether the files of a layout contain every tensor: known from the layout, without numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptool.core.catalog import TensorEntry, tied_names
from ckptool.core.layout import written_entries
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.text import plural
from ckptool.core.views import narrow
from ckptool.errors import NotVerified


def require_complete(plan: Plan) -> None:
    """Raise NotVerified if the files of the layout do not contain every tensor completely.

    A comparison of all files proves that as well, a comparison of some does not.
    """
    entries = [kept_rows(plan, entry) for entry in plan.entries]
    written = written_entries(plan.layout, {entry.name: entry for entry in entries})
    require_none_missing(plan, entries, written)
    problem = next((p for p in map(coverage_problem, written.values()) if p is not None), None)
    if problem is not None:
        raise not_verified(f"not written completely: {problem}")


def require_none_missing(
    plan: Plan, entries: Sequence[TensorEntry], written: Mapping[str, TensorEntry]
) -> None:
    """Raise NotVerified if one of the tensors to be written is not among the ``written`` ones."""
    missing = _missing(plan, [entry for entry in entries if entry.name not in written])
    if missing:
        raise not_verified(f"{plural(len(missing), 'tensor')} not written, first {missing[0]}")


def _missing(plan: Plan, unwritten: Sequence[TensorEntry]) -> list[str]:
    """Return the names that should be in the output but are not.

    A layout may store one of several tied tensors, and no tensor without elements.
    """
    names = {entry.name for entry in unwritten if entry.elements}
    if not names:
        return []
    groups = [tied for tied in tied_names(plan.catalog) if not names.isdisjoint(tied)]
    twins = {n: plan.catalog.tensors[n] for tied in groups for n in tied if n not in names}
    stored = written_entries(plan.layout, twins) if twins else {}
    names -= {n for tied in groups if not stored.keys().isdisjoint(tied) for n in tied}
    return [entry.name for entry in unwritten if entry.name in names]


def kept_rows(plan: Plan, entry: TensorEntry) -> TensorEntry:
    """Return a tensor as it is to be written: without its last rows, if the layout drops them."""
    rows = plan.layout.rows.get(entry.name)
    return entry if rows is None else narrow(entry, 0, 0, rows)


def not_verified(what: str) -> NotVerified:
    """Return the error of an output that is not what it should be."""
    return NotVerified(f"verification failed: {what}")
