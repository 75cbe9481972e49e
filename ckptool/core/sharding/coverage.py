"""Whether chunks tile their tensors: one problem for all that have one cause."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptool.core.catalog import TensorEntry, coverage_problem
from ckptool.core.text import plural
from ckptool.errors import Problem

_GAP = "chunk-gap"


def coverage_problems(entries: Collection[TensorEntry]) -> list[Problem]:
    """Return why tensors are not tiled; one problem if one rank alone saved its shards."""
    problems = [problem for problem in map(coverage_problem, entries) if problem is not None]
    alone = lone_rank_problem(entries, problems)
    if alone is None:
        return problems
    return [alone, *(problem for problem in problems if problem.code != _GAP)]


def lone_rank_problem(
    entries: Iterable[TensorEntry], problems: Iterable[Problem]
) -> Problem | None:
    """Return the one cause of all gaps, if several tensors have one chunk each, all of one rank.

    A trainer whose rank 0 saves alone, as without sharding, saves only what rank 0 holds.
    """
    lacking = {problem.tensor for problem in problems if problem.code == _GAP}
    if len(lacking) < 2:
        return None
    ranks: set[int | None] = set()
    held = whole = 0
    for entry in entries:
        chunks = entry.chunks
        ranks |= {chunks[0].rank if len(chunks) == 1 else None} if len(chunks) else set()
        if entry.name in lacking and len(chunks):
            held, whole = held + chunks[0].box.volume, whole + entry.elements
    if len(ranks) != 1 or None in ranks:
        return None
    rank = ranks.pop()
    message = (
        f"only rank {rank} saved its shards: {plural(len(lacking), 'tensor')} hold {held:,} of"
        f" {whole:,} elements, such as {next(p for p in problems if p.tensor in lacking)}"
    )
    return Problem(message, "rank-missing").with_hint(
        "use a checkpoint that all ranks saved: each has to call the save, or to take part in"
        " gathering the tensors before (full_state_dict=True)"
    )
