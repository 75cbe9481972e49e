"""Differences between two checkpoints, or between one and the model of a config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, field

from ckptool.commands.document import Report, document, plain
from ckptool.commands.open import no_collecting, open_checkpoint
from ckptool.commands.options.declaration import changed
from ckptool.commands.options.diff import DiffOptions
from ckptool.commands.options.question import Question
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.codes import Severity
from ckptool.commands.verify.compare.against import AgainstReport, Comparison, Side
from ckptool.commands.verify.compare.fit import Fit, find_fit
from ckptool.commands.verify.compare.lineup import config_folder
from ckptool.commands.verify.compare.model import is_model, open_other
from ckptool.commands.verify.compare.names import (
    differ_in_type_alone,
    differing_companions,
)
from ckptool.commands.verify.compare.runs import is_argument, newest_of_both
from ckptool.commands.verify.findings import NOTHING_COMPARED, SIDES, Finding
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.text import plural
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.errors import UsageError
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.commands.verify.compare.changes import ChangedModule, ChangedTensor

_SHOWN_APART = frozenset(
    ["tensor-missing", "tensor-extra", "shape-differs", "dtype-differs", "tensor-differs"]
)
"""The codes of findings that the report has as tensors."""
_OF_CONTENT = frozenset(
    "value-differs value-not-compared metadata-differs companion-missing companion-differs"
    " excluded nothing-compared".split()
)
"""The codes of what is not compared without ``--values``."""
_OF_RUNS = _OF_CONTENT - {"excluded", "nothing-compared"}
"""The codes of what is compared of runs even without ``--values``."""
_OF_VALUES = frozenset(["value-missing", "value-extra", "values-unsupported"])
"""The codes that the model of a config.json has nothing to do with."""


class DiffSide(Struct, frozen=True):
    """One side. ``model`` is the class if it is the model of a config.json."""

    path: Location
    format: str | None
    tensors: int = field(name="totals.tensors")
    nbytes: int = field(name="totals.bytes")
    model: str | None = None


class TensorPairs(Struct, frozen=True):
    """Tensors of one name whose shapes or element types differ."""

    a: TensorEntry
    b: TensorEntry

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON."""
        sides = (("a", self.a), ("b", self.b))
        looks = {side: {"dtype": e.dtype.name, "shape": e.shape} for side, e in sides}
        return {"tensor": self.a.name, **looks}


class DiffReport(Report, frozen=True):
    """The differences; true if there are none.

    ``changed`` and ``modules`` are empty if values were not compared. ``alike`` tensors have the
    same name, shape and element type; ``findings`` are all differences besides tensors'. ``fit`` is
    the option that would give A more of B's names, ``hint`` another next step. ``readable`` is
    false if a side is damaged, so that nothing could be compared. ``of_runs`` is true if both are
    the newest step that two runs have: non-tensor values and configs are compared then, and come
    first.
    """

    a: DiffSide
    b: DiffSide
    only_a: tuple[TensorEntry, ...]
    only_b: tuple[TensorEntry, ...]
    shapes: tuple[TensorPairs, ...]
    types: tuple[TensorPairs, ...]
    alike: int
    compared: bool
    changed: tuple[ChangedTensor, ...]
    modules: tuple[ChangedModule, ...]
    findings: tuple[Finding, ...]
    fit: Fit | None
    readable: bool
    ok: bool
    summary: str
    of_runs: bool = False
    hint: str | None = None

    schema: ClassVar = "diff"

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return document(
            self.schema,
            a=self.a,
            b=self.b,
            only_a=list(map(_look, self.only_a)),
            only_b=list(map(_look, self.only_b)),
            shape_differs=[pair.to_dict() for pair in self.shapes],
            dtype_differs=[pair.to_dict() for pair in self.types],
            alike=self.alike,
            values_compared=self.compared,
            changed=[plain(c.tensor) | {"relative": c.relative} for c in self.changed],
            modules=self.modules,
            findings=self.findings,
            fit=self.fit,
            readable=self.readable,
            of_runs=self.of_runs,
            ok=self.ok,
            summary=self.summary,
        )


def _look(entry: TensorEntry) -> dict[str, Any]:
    return {"name": entry.name, "dtype": entry.dtype.name, "shape": entry.shape}


@no_collecting()
def diff(
    path: Location,
    other: Location,
    options: DiffOptions,
    progress: Progress = UNWATCHED,
) -> DiffReport:
    """Compare names, shapes and element types of tensors, and with ``values`` their content.

    The comparison is that of ``verify --against``; of two runs, the newest step that both have is
    compared. Raises NotFound, Unrecognized or UsageError if there is nothing to compare.
    """
    _require_possible(options)
    pair = newest_of_both(path, other, options.read)
    if pair is not None:
        path, other = (step.path for step in pair.steps)
    theirs = ReadOptions(options.compare.other_format, per_rank=options.read.per_rank)
    how = {"whole": False, "placements": False}
    one = Side(SIDES[0], path, lambda: open_checkpoint(path, options.read, **how))
    names = one.opened.catalog.tensors if one.opened else {}
    two = Side(SIDES[1], other, lambda: open_other(other, theirs, names))
    if options.values and two.opened is not None and _is_model(two):
        raise UsageError(f"{two.opened.path}: a model without values to compare with")
    verify = VerifyOptions(read=options.read, workers=options.workers)
    question = Question(check=verify, rewrite=options.rewrite, comparison=options.compare)
    comparison = Comparison((one, two), question)
    comparison.compare_structure()
    if options.values:
        comparison.compare_content(progress)
    if pair is not None:
        comparison.problems += pair.differing_configs
        if not options.values and one.opened is not None and two.opened is not None:
            comparison.problems += differing_companions(one.opened, two.opened, options.rewrite)
    return _report(comparison, options, progress, of_runs=pair is not None)


def _require_possible(options: DiffOptions) -> None:
    """Raise UsageError for value options if values are not compared."""
    of_values = {"--rtol", "--atol"} & {*changed(options.compare)}
    if of_values and not options.values:
        raise UsageError(f"{min(of_values)} says when values are equal: it needs --values")


def _report(
    comparison: Comparison,
    options: DiffOptions,
    progress: Progress,
    *,
    of_runs: bool,
) -> DiffReport:
    sides, (one, other) = comparison.sides, _catalogs(comparison)
    common = [name for name in one.tensors if name in other.tensors]
    pairs = [TensorPairs(one.tensors[name], other.tensors[name]) for name in common]
    shapes = tuple(pair for pair in pairs if pair.a.shape != pair.b.shape)
    matches = {*comparison.matches}
    types = tuple(p for p in pairs if p.a.shape == p.b.shape and p.a.name not in matches)
    only_a = tuple(entry for name, entry in one.tensors.items() if name not in other.tensors)
    only_b = tuple(entry for name, entry in other.tensors.items() if name not in one.tensors)
    tensors, modules = _changes(comparison, options, progress)
    whole = comparison.report()
    findings = [f for f in whole.verify.findings if f.code not in _SHOWN_APART]
    if of_runs:
        findings.sort(key=lambda finding: not is_argument(finding.tensor))
    if not options.values:
        left_out = _OF_CONTENT | _OF_VALUES if _is_model(sides[1]) else _OF_CONTENT
        left_out -= _OF_RUNS if of_runs else frozenset()
        findings = [f for f in findings if f.code not in left_out]
    counts = {
        "only in A": len(only_a),
        "only in B": len(only_b),
        "of another shape": len(shapes),
        "of another type": len(types),
        "changed": len(tensors),
        "with NaN": sum(math.isnan(change.relative or 0.0) for change in tensors),
    }
    if any(counts.values()):
        findings = [f for f in findings if f.code != NOTHING_COMPARED]  # that is why
    different = any(counts.values()) or any(f.severity is Severity.ERROR for f in findings)
    return DiffReport(
        a=_side(sides[0]),
        b=_side(sides[1]),
        only_a=only_a,
        only_b=only_b,
        shapes=shapes,
        types=types,
        alike=len(comparison.matches),
        compared=options.values,
        changed=tensors,
        modules=modules,
        findings=tuple(findings),
        fit=_fit(sides, one, other, options) if only_b else None,
        readable=whole.coverage is not None,
        ok=whole.coverage is not None and not different,
        summary=_summary(whole, counts, findings, comparison, options),
        of_runs=of_runs,
        hint=_hint(comparison, types, options),
    )


def _hint(
    comparison: Comparison,
    types: Sequence[TensorPairs],
    options: DiffOptions,
) -> str | None:
    """Return the options that would compare more than was compared, in a sentence."""
    if _is_model(comparison.sides[1]):
        return None
    if any(differ_in_type_alone(pair.a, pair.b) for pair in types):
        flags = "--cast" if options.values else "--values --cast"
        return f"{flags} compares them, rounded to the coarser type of both"
    if comparison.matches and not options.values:
        return "--values compares the contents, too"
    return None


def _fit(
    sides: tuple[Side, Side], catalog: Catalog, other: Catalog, options: DiffOptions
) -> Fit | None:
    """Return the option that would give the first side more of the other's names, if any."""
    one, two = (side.opened for side in sides)
    if one is None or two is None:
        return None
    return find_fit(one, catalog, other, options.rewrite.map.assets or config_folder(two))


def _catalogs(comparison: Comparison) -> tuple[Catalog, Catalog]:
    """Return the compared catalogs of both sides: empty if one cannot be read."""
    if comparison.alignment is None:
        return Catalog("", {}, {}, {}), Catalog("", {}, {}, {})
    return comparison.alignment.result.catalog, comparison.alignment.counterpart.catalog


def _changes(
    comparison: Comparison, options: DiffOptions, progress: Progress
) -> tuple[tuple[ChangedTensor, ...], tuple[ChangedModule, ...]]:
    """Measure the tensors that changed, and sum up the changes by module."""
    differing = {tensor.name for tensor in comparison.differing}
    pairs = [pair for pair in comparison.pairs if pair.one.name in differing]
    one, two = (side.opened for side in comparison.sides)
    if not pairs or one is None or two is None:
        return (), ()
    from ckptool.commands.verify.compare.changes import changed_modules, changed_tensors, measure

    sources = one.source, two.source
    workers = options.workers or max(source.policy.workers for source in sources)
    progress.begin(sum(pair.nbytes for pair in pairs))
    squares = measure(pairs, sources, workers, progress)
    tensors = changed_tensors(comparison.differing, squares)
    names = [pair.one.name for pair in comparison.pairs]
    return tensors, changed_modules(names, tensors, squares)


def _is_model(side: Side) -> bool:
    return side.opened is not None and is_model(side.opened)


def _side(side: Side) -> DiffSide:
    if side.opened is None:
        return DiffSide(side.path, None, 0, 0)
    opened = side.opened
    tensors = opened.catalog.tensors.values()
    model = opened.catalog.info["framework"] if is_model(opened) else None
    nbytes = sum(entry.nbytes for entry in tensors)
    return DiffSide(opened.path, opened.format.name, len(tensors), nbytes, model)


def _summary(
    whole: AgainstReport,
    counts: dict[str, int],
    findings: list[Finding],
    comparison: Comparison,
    options: DiffOptions,
) -> str:
    """Return one line that begins with SAME NAMES, EQUAL, DIFFERENT or FAILED."""
    if whole.coverage is None:
        return whole.verify.summary
    errors = sum(f.count for f in findings if f.severity is Severity.ERROR)
    parts = [f"{count:,} {what}" for what, count in counts.items() if count]
    if parts:
        parts[0] = parts[0].replace(
            " ", " tensor " if parts[0].startswith("1 ") else " tensors ", 1
        )
    parts += [plural(errors, "other difference")] if errors else []
    if parts:
        return f"DIFFERENT: {', '.join(parts)}"
    if options.values:
        return whole.verify.summary
    text = f"SAME NAMES, SHAPES AND TYPES: {plural(len(comparison.matches), 'tensor')}"
    values = f", {plural(whole.values, 'value')} by name" if whole.values else ""
    return f"{text}{values}; contents not compared"
