"""Whether a checkpoint is the model that it should be: another's tensors, in any naming and shards.

Names and shapes are compared, from metadata alone. On demand elements are, too: of tensors that
training should have changed, or should not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint, open_checkpoint
from ckptool.commands.options.question import Question
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.codes import Severity
from ckptool.commands.verify.compare.lineup import LineUp, line_up
from ckptool.commands.verify.compare.model import is_model, open_other
from ckptool.commands.verify.compare.modules import count_modules, lost_modules, numbers_of
from ckptool.commands.verify.compare.names import readable, stored_problems
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.verification import Verification, examine
from ckptool.core.catalog import Catalog
from ckptool.core.selection import tensors_named
from ckptool.core.state_category import model_prefixes
from ckptool.core.text import plural
from ckptool.engine.check.difference import Tolerance
from ckptool.engine.check.pairs import TensorPair
from ckptool.engine.check.tensors import compare
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.tensors import CheckedSource, TensorSource
from ckptool.errors import Damaged, Hostile, Problem, UsageError
from ckptool.storage.url import Location

_BUFFERS = ("rotary_emb.inv_freq", "rope.cache", "freqs_cis", "_extra_state")
"""Computed from the configuration, or settings of Transformer Engine: some versions save them."""


def verify_like(
    path: Location, other: Location, question: Question, progress: Progress = UNWATCHED
) -> VerifyReport:
    """Verify the checkpoint at ``path``, and compare its model with that of ``other``.

    That is a checkpoint of any format, or a config.json. The rewriting gives its names, if ckptool
    finds no way to them. Raises as ``verify`` and ``open_other`` do, UsageError for a pattern that
    no tensor of both matches.
    """
    options, comparing = question.check, question.like
    if options.quick and (comparing.expect_changed or comparing.expect_equal):
        raise UsageError("--expect-changed and --expect-equal read data: not with --quick")
    reference = open_other(other, ReadOptions(question.comparison.other_format), ())
    verification = examine(path, options, progress)
    report = verification.report()
    opened = _open_readable(verification, options)
    if opened is None:
        summary = f"FAILED: cannot be read, so not compared with {other}"
        return replace(report, ok=False, summary=summary)
    lined = line_up(opened, reference, question.rewrite)
    if lined.is_unlike:
        return verification.report([_unlike_problem(lined, other)])
    explained = _explained(report, opened.catalog)
    problems = [
        *_differing_names(lined, explained, other),
        *_differing_shapes(lined, other),
    ]
    problems += _unexpected((opened, reference), lined, question, progress)
    report = verification.report(problems)
    return replace(report, summary=f"{report.summary}; {_found_text(lined, other)}")


def _open_readable(verification: Verification, options: VerifyOptions) -> OpenedCheckpoint | None:
    """Return what can be read of a checkpoint, damaged or not; None if that is nothing."""
    surveyed = verification.surveyed
    try:
        return open_checkpoint(surveyed.path, options.read, whole=False, placements=False)
    except (Damaged, Hostile):
        return surveyed.opened


def _explained(report: VerifyReport, catalog: Catalog) -> set[str]:
    """Return the model's own names for the tensors that an error found in the files affects."""
    names = {name for error in report.of(Severity.ERROR) for name in error.names}
    starts = tuple(f"{prefix}." for prefix in model_prefixes(catalog))
    return names | {name.removeprefix(start) for name in names for start in starts}


def _unlike_problem(lined: LineUp, other: Location) -> Problem:
    message = f"{len(lined.common):,} of {plural(len(lined.one.tensors), 'tensor')} of the model"
    message += f" have a name of {other}, which has {len(lined.other.tensors):,}"
    message += f", such as {next(iter(lined.other.tensors))}" if lined.other.tensors else ""
    return Problem(message, "like-unnamed")


def _found_text(lined: LineUp, other: Location) -> str:
    """Return how much of the other model was found, and under which names."""
    names = lined.other.tensors
    counted = count_modules(names)
    counts = f" ({counted})" if counted else ""
    how = f", {lined.how}" if lined.how else ""
    return f"{len(lined.common):,} of {plural(len(names), 'tensor')} of {other}{counts} found{how}"


def _differing_names(
    lined: LineUp, explained: Collection[str], other: Location
) -> Iterator[Problem]:
    """Yield a problem for each tensor that only one has; nothing twice that is ``explained``."""
    present = {*lined.one.tensors, *lined.one.conflicts, *explained}
    missing = _absent_names(lined.other, present, lined)
    extra = _absent_names(lined.one, lined.other.tensors, lined)
    for names, holder, lacker, code, what in (
        (missing, lined.other, lined.one, "like-missing", f"missing, {other} has it"),
        (extra, lined.one, lined.other, "like-extra", f"not in {other}"),
    ):
        modules = lost_modules(names, numbers_of(lacker.tensors), numbers_of(holder.tensors))
        for name in names:
            shape = list(holder.tensors[name].shape)
            of = f", as is {modules[name]}" if name in modules else f": {shape}"
            yield Problem(f"{name}: {what}{of}", code, tensor=name)


def _absent_names(catalog: Catalog, names: Collection[str], lined: LineUp) -> list[str]:
    """Return a catalog's tensors that are not in ``names``, nor tied to any there, nor computed."""
    return [
        name
        for name in catalog.tensors
        if name not in names
        and not name.endswith(_BUFFERS)
        and lined.tied_to(name).isdisjoint(names)
    ]


def _differing_shapes(lined: LineUp, other: Location) -> Iterator[Problem]:
    for name in lined.common:
        shapes = lined.one.tensors[name].shape, lined.other.tensors[name].shape
        if shapes[0] != shapes[1]:
            message = f"{name}: {list(shapes[0])}, but {list(shapes[1])} in {other}"
            yield Problem(message, "like-shape", tensor=name)


def _unexpected(
    sides: tuple[OpenedCheckpoint, OpenedCheckpoint],
    lined: LineUp,
    question: Question,
    progress: Progress,
) -> Iterator[Problem]:
    """Yield the tensors that are equal to the other's and should have changed, or the reverse."""
    comparing = question.like
    matches = [
        n for n in lined.common if lined.one.tensors[n].shape == lined.other.tensors[n].shape
    ]
    common = lined.one.with_tensors({name: lined.one.tensors[name] for name in matches})
    changed = tensors_named(common, comparing.expect_changed, "--expect-changed")
    equal = tensors_named(common, comparing.expect_equal, "--expect-equal")
    if not changed and not equal:
        return
    if is_model(sides[1]):
        raise UsageError(f"{comparing.like}: a model without values to compare with")
    if twice := {*changed} & {*equal}:
        raise UsageError(f"{min(twice)}: expected to be changed, and to be equal")
    names = [name for name in matches if name in {*changed, *equal}]
    differing, problems = _differing_tensors(sides, lined, names, question.check, progress)
    yield from problems
    unread = {problem.tensor for problem in problems}
    for name in names:
        if name in unread:
            continue
        if name in changed and name not in differing:
            yield Problem(f"{name}: equal to {comparing.like}", "like-unchanged", tensor=name)
        elif name in equal and name in differing:
            yield Problem(f"{name}: not equal to {comparing.like}", "like-changed", tensor=name)


def _differing_tensors(
    sides: tuple[OpenedCheckpoint, OpenedCheckpoint],
    lined: LineUp,
    names: Iterable[str],
    options: VerifyOptions,
    progress: Progress,
) -> tuple[set[str], list[Problem]]:
    """Return which tensors differ, and why some cannot be read or are not as they were written.

    Bits are compared, or exact numbers if the element types are not the same. Checksums of the
    first side are only taken if a sample of it was verified.
    """
    opened, problems = [], list[Problem]()
    for side, catalog in zip(sides, (lined.one, lined.other), strict=True):
        tensors = {name: catalog.tensors[name] for name in names}
        part, failures = readable(side, replace(catalog, tensors=tensors, objects={}))
        opened.append(part.tensors)
        problems += [failure.of_tensor(name) for name, failure in failures.items()]
    pairs = [
        TensorPair(opened[0][name], opened[1][name], is_cast=False)
        for name in names
        if name in opened[0] and name in opened[1]
    ]
    workers = options.workers or max(side.source.policy.workers for side in sides)
    first = CheckedSource if options.sample < 1 else TensorSource
    reads = first(sides[0].source), CheckedSource(sides[1].source)
    progress.begin(sum(pair.nbytes for pair in pairs))
    differing: set[str] = set()
    for tolerance in (None, Tolerance()):
        batch = [p for p in pairs if (p.one.dtype is p.other.dtype) == (tolerance is None)]
        result = compare(batch, reads, tolerance, workers, progress)
        differing |= result.differences.keys()
        for name, (_, error) in result.unreadable.items():
            problems += [problem.of_tensor(name) for problem in error.problems]
    entries = [pair.one for pair in pairs], [pair.other for pair in pairs]
    for side, read, read_entries in zip(sides, reads, entries, strict=True):
        if isinstance(read, CheckedSource):
            damaged = stored_problems(read, read_entries, workers)
            problems += [problem.within(str(side.path)) for problem in damaged]
    return differing, problems
