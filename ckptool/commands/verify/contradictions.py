"""What contradicts itself in a catalog, and between the copies that ranks hold."""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.core.catalog import Catalog, TensorEntry, coverage_problem, flat_name
from ckptool.engine.replicas import differing_replicas
from ckptool.engine.sources import Files
from ckptool.errors import UNCODED, CkptoolError, Problem
from ckptool.formats._outgoing import NOT_CARRIED, plain_objects


def catalog_problems(catalog: Catalog) -> list[Problem]:
    """Names that ranks contradict one another in, gaps, odd names, and a scan's remarks."""
    gaps = (coverage_problem(entry) for entry in catalog.tensors.values())
    remarks = [p if isinstance(p, Problem) else Problem(p, "note") for p in catalog.notes]
    for remark in remarks:
        remark.code = "note" if remark.code == UNCODED else remark.code
    conflicts = catalog.conflicts.values()
    return [
        *(p if isinstance(p, Problem) else Problem(p, "ranks-disagree") for p in conflicts),
        *(gap for gap in gaps if gap is not None),
        *_misnamed(catalog),
        *_not_carried(catalog),
        *remarks,
    ]


def _not_carried(catalog: Catalog) -> list[Problem]:
    """What convert and reshard say that they leave behind."""
    _, notes = plain_objects(catalog)
    return [note for note in notes if isinstance(note, Problem) and note.code == NOT_CARRIED]


def _misnamed(catalog: Catalog) -> list[Problem]:
    return [
        Problem(
            f"{entry.name}: its path spells {flat_name(entry.path)!r}",
            "name-mismatch",
            tensor=entry.name,
        )
        for entry in catalog.tensors.values()
        if flat_name(entry.path) != entry.name
    ]


def replica_problems(entries: Iterable[TensorEntry], source: Files) -> list[Problem]:
    """Copies of one chunk that differ, or that cannot be read."""
    problems: list[Problem] = []
    for entry in entries:
        try:
            problems += differing_replicas([entry], source)
        except CkptoolError as error:
            problems += error.problems
    return problems
