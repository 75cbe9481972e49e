"""Whether the output is correct: the source against the output, as it is in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.layout import written_entries
from ckptool.core.planning.plan import Plan
from ckptool.core.text import plural
from ckptool.engine.check.complete import kept_rows, not_verified, require_none_missing
from ckptool.engine.check.difference import differing_tensor
from ckptool.engine.check.pairs import PairSource, TensorPair
from ckptool.engine.check.proof import proof_jobs
from ckptool.engine.check.replicas import differing_replicas
from ckptool.engine.check.rest import Rest
from ckptool.engine.check.tensors import TensorComparison
from ckptool.engine.progress import Progress
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import Changed, SourceError
from ckptool.storage.files import Files


def require_written(
    plan: Plan,
    numbers: Sequence[int],
    sides: tuple[Files, Files],
    how: tuple[int, Progress],
    sums: ReadSums,
    *,
    later: Collection[int] = (),
) -> RangeCheck:
    """Compare all bytes of some files of the layout with the source and the plan.

    Returns how many numbers the casts made infinite. Files that are written ``later`` hold no
    tensors. ``sides`` are the files of the source and of the output; ``sums`` are of what was read
    to write them, ``how`` is the number of threads, and what counts the bytes. The elements of
    the source are those to be written: renamed, cast and dequantized. The output is read where its
    own description says that they are, whatever the plan made of them. Raises NotVerified if it is
    not as planned, and the errors of reading the source.
    """
    entries = [kept_rows(plan, entry) for entry in plan.entries]
    layout = replace(plan.layout, files=tuple(plan.layout.files[number] for number in numbers))
    sources = {entry.name: entry for entry in entries}
    written = written_entries(layout, sources)
    is_whole = len({*numbers, *later}) == len(plan.layout.files)
    if is_whole:
        require_none_missing(plan, entries, written)
    pairs = [  # in the order of the output, which is read
        TensorPair(sources[name], other, boxes=() if is_whole else _boxes(other))
        for name, other in written.items()
    ]
    comparison = TensorComparison()
    ranges = RangeCheck()
    source = PairSource(TensorSource(sides[0], ranges), TensorSource(sides[1]))
    rest = Rest(layout.files, source.sides, sums)
    jobs = rest.jobs(proof_jobs(pairs, sums, source.sides, ranges))
    read_tiles(source, jobs, comparison.look, *how)
    unreadable = (pair.one.name for pair in pairs if pair.one.name in comparison.unreadable)
    for name in unreadable:  # in the order of the tensors, not that of the threads
        side, error = comparison.unreadable[name]
        if side == 1 and isinstance(error, SourceError | Changed):
            raise not_verified(f"{name} cannot be read back: {error.message}") from error
        raise error.within(sides[0].root) if isinstance(error, Changed) else error
    differing = [pair for pair in pairs if pair.one.name in comparison.differences]
    if differing:
        first = differing_tensor(differing[0], comparison.differences[differing[0].one.name])
        count = f"{len(differing):,} of {plural(len(pairs), 'tensor')}"
        raise not_verified(f"{count} differ between source (A) and output (B): {first.problem}")
    try:  # the pairs are of the first of each box: copies that ranks store again are not
        copies = differing_replicas(written.values(), sides[1], how[0])
    except (SourceError, Changed) as error:
        raise not_verified(f"a replica cannot be read back: {error.message}") from error
    if copies:
        raise not_verified(f"{plural(len(copies), 'replica')} differ after writing: {copies[0]}")
    if (problem := rest.problem()) is not None:
        raise not_verified(problem)
    return ranges


def _boxes(written: TensorEntry) -> tuple[Box, ...]:
    """Return the parts of a tensor that are written; none if all of it is."""
    whole = Box.whole(written.shape)
    boxes = tuple(chunk.box for chunk in written.chunks)
    return () if boxes == (whole,) else boxes
