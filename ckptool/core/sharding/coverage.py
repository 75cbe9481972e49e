"""Whether chunks tile their tensors: one problem for all that have one cause."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptool.core.box import Box, is_grid
from ckptool.core.casts import computed_places
from ckptool.core.catalog import TensorEntry
from ckptool.core.chunks import chunks_of
from ckptool.core.sharding.overlaps import overlapping_pair
from ckptool.core.text import plural
from ckptool.errors import Problem

_GAP = "chunk-gap"


def coverage_problems(entries: Collection[TensorEntry]) -> list[Problem]:
    """Return why tensors are not tiled; one problem if one rank alone saved its shards."""
    problems = [problem for problem in map(coverage_problem, entries) if problem is not None]
    cause = lone_rank_problem(entries, problems) if problems else None
    if cause is None:
        return problems
    return [cause, *(problem for problem in problems if problem.code != _GAP)]


def lone_rank_problem(
    entries: Collection[TensorEntry], problems: Collection[Problem]
) -> Problem | None:
    """Return the one cause of the gaps, if most tensors have one, and all chunks are of one rank.

    A trainer whose rank 0 saves alone, as without sharding, saves only what rank 0 holds.
    """
    lacking = {problem.tensor for problem in problems if problem.code == _GAP}
    larger = [entry for entry in entries if entry.elements > 1]
    if len(lacking) < 2 or 2 * len(lacking) < len(larger):
        return None
    ranks = {chunk.rank for entry in entries for chunk in entry.chunks}
    if len(ranks) != 1 or None in ranks:
        return None
    parts = [entry for entry in larger if entry.name in lacking]
    elements = sum(chunk.box.volume for entry in parts for chunk in entry.chunks)
    total = sum(entry.elements for entry in parts)
    rank = ranks.pop()
    message = (
        f"only rank {rank} saved its shards: {plural(len(lacking), 'tensor')} hold {elements:,} of"
        f" {total:,} elements, such as {next(p for p in problems if p.tensor in lacking)}"
    )
    return Problem(message, "rank-missing").with_hint(
        "use a checkpoint that all ranks saved: each has to call the save, or to take part in"
        " gathering the tensors before (full_state_dict=True)"
    )


def coverage_problem(entry: TensorEntry) -> Problem | None:
    """Return why the chunks do not tile the tensor exactly, in numbers; None if they do.

    Also why the chunks of the tensors that it is computed of do not.
    """
    chunks = chunks_of(entry)
    if chunks.bare:
        return None
    boxes = chunks.boxes
    if not is_grid(boxes, entry.shape) and (problem := _tiling_problem(entry, boxes)):
        return problem
    sources = [part for at in computed_places(entry) for part in at.stored]
    return next(filter(None, map(coverage_problem, sources)), None) if sources else None


def _tiling_problem(entry: TensorEntry, boxes: Sequence[Box]) -> Problem | None:
    """Return why boxes that form no grid do not tile the tensor; None if they do."""
    whole = Box.whole(entry.shape)
    for box in boxes:
        if not whole.contains(box):
            message = f"{entry.name}: chunk {box} is outside shape {list(entry.shape)}"
            return Problem(message, "chunk-outside", tensor=entry.name)
    pair = overlapping_pair(boxes)
    if pair:
        message = f"{entry.name}: chunks {pair[0]} and {pair[1]} overlap"
        return Problem(message, "chunk-overlap", tensor=entry.name)
    volume = sum(box.volume for box in boxes)
    if volume != entry.elements:
        message = (
            f"{entry.name}: chunks hold {volume:,} of {entry.elements:,} elements"
            f" of shape {list(entry.shape)}; {entry.elements - volume:,} missing"
        )
        return Problem(message, "chunk-gap", tensor=entry.name)
    return None
