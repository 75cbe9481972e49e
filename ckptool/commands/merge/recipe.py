"""What to merge: a weighted sum of checkpoints, and what is taken from others instead."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.merge.recipe_file import read_file
from ckptool.commands.options.declaration import parse_whole
from ckptool.commands.options.merge import ROWS, ExpressionOptions
from ckptool.core.text import plural
from ckptool.engine.formulas.rows import MEAN, ZEROS
from ckptool.errors import UsageError
from ckptool.storage.url import Location

_NOISE = 1e-9
"""How much of its terms a sum must be."""
_COPIED = "copied:"
_WAYS = "--average, --sum, --ema, --add, --lora, --apply-delta, --rows or --take"


class Term(Struct, frozen=True):
    """A checkpoint in a sum, and its weight."""

    place: Location
    weight: float = 1.0


class Take(Struct, frozen=True):
    """Tensors, as options name them, that come from a checkpoint instead."""

    name: str
    place: Location


class Rows(Struct, frozen=True):
    """How many rows tensors are to have, as options name them, and how new ones are filled.

    ``fill`` is ``mean``, ``zeros``, or the number of the row that all are copied from.
    """

    name: str
    count: int
    fill: str | int

    @property
    def rule(self) -> str:
        """The rule as an option says it."""
        return f"{_COPIED}{self.fill}" if isinstance(self.fill, int) else self.fill


class Recipe(Struct, frozen=True):
    """A weighted sum of checkpoints over a divisor, with tensors taken from others.

    The first term is also where everything comes from that is not computed; without the optimizer's
    state that is the rest of the model alone. Into it a ``lora``, an adapter, is folded, or weight
    ``deltas`` are applied to it in order. Rows are appended last.
    """

    terms: tuple[Term, ...]
    divisor: float = 1.0
    takes: tuple[Take, ...] = ()
    with_optimizer: bool = False
    lora: Location | None = None
    deltas: tuple[Location, ...] = ()
    rows: tuple[Rows, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the sum is the first checkpoint as it is."""
        return len(self.terms) == 1 and self.terms[0].weight == self.divisor == 1

    def text(self, labels: Sequence[str]) -> str:
        """Return the sum in words, by the labels of its terms: ``(a + b) / 2``."""
        sum_of = ""
        for label, term in zip(labels, self.terms, strict=True):
            sign = "-" if term.weight < 0 else "+"
            size = "" if abs(term.weight) == 1 else f"{abs(term.weight):g} * "
            lead = f" {sign} " if sum_of else "-" if sign == "-" else ""
            sum_of += f"{lead}{size}{label}"
        return sum_of if self.divisor == 1 else f"({sum_of}) / {self.divisor:g}"

    @property
    def places(self) -> list[Location]:
        """Every checkpoint that is read, the first one first."""
        terms, takes = (term.place for term in self.terms), (take.place for take in self.takes)
        adapter = [] if self.lora is None else [self.lora]
        return list(dict.fromkeys([*terms, *self.deltas, *adapter, *takes]))


def read_recipe(
    sources: Sequence[Location], options: ExpressionOptions, *, proves: bool = False
) -> Recipe:
    """Return the recipe of a command, or of the file that it names.

    Raises UsageError if it says nothing to do, or contradicts itself, or if it ``proves`` a former
    merge of the newest steps, which may be others now; NotFound or Unrecognized if the newest steps
    are asked of what is no run.
    """
    if options.recipe is not None:
        if sources or options != ExpressionOptions(recipe=options.recipe):
            raise UsageError(
                f"--recipe {options.recipe}: says all that is merged; leave SRC and other options"
                " out"
            )
        recipe_file = options.recipe
        sources, options = read_file(recipe_file)
        if proves and options.last is not None:
            raise UsageError(
                f"--recipe {recipe_file}: last = {options.last}: the newest steps may be others now"
                " than those that were merged",
                hint="name those in its place: sources = ['RUN/step-800', 'RUN/step-900']",
            )
    rows = _rows(options)
    recipe = _sum_of(sources, options)
    takes = tuple(Take(name, place) for name, place in options.take)
    return replace(recipe, takes=takes, rows=rows, with_optimizer=options.with_optimizer)


def _sum_of(sources: Sequence[Location], options: ExpressionOptions) -> Recipe:
    """Return the recipe of a sum alone, or of a checkpoint of which tensors are replaced."""
    ways = {"--average": options.average, "--sum": options.sum, "--ema": options.ema is not None}
    ways["--lora"] = options.lora is not None
    ways["--add"] = options.add is not None or options.minus is not None
    ways["--apply-delta"] = options.apply_delta
    flags = [way for way, is_asked in ways.items() if is_asked]
    if len(flags) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]}: one at a time")
    _require_used(options, flags)
    if not flags:
        return Recipe((Term(_base(sources, options)),))
    if options.lora is not None:
        base = _base(sources, options)
        if base == options.lora:
            raise UsageError(
                f"--lora {base}: is the base, too",
                hint="of a folder with both, name the adapter's file, adapter_model.safetensors",
            )
        return Recipe((Term(base),), lora=options.lora)
    if flags == ["--add"]:
        return Recipe(_sum_terms(sources, options))
    if options.apply_delta:
        return Recipe((_delta_base(sources, options),), deltas=tuple(sources))
    if options.last is not None:
        sources = _newest(sources, options.last)
    if len(sources) < 2:
        count = "1 is" if sources else "none is"
        raise UsageError(
            f"{flags[0]}: needs two SRC or more, {count} given",
            hint=f"ckptool merge OUT {flags[0]}{' 0.9' if options.ema is not None else ''} A B C,"
            " or RUN --last 5",
        )
    if options.ema is not None:
        return Recipe(_average_terms(sources, options.ema))
    weights = options.weights or (1.0,) * len(sources)
    if len(weights) != len(sources):
        raise UsageError(f"--weights: {len(weights)} for {len(sources)} SRC")
    return Recipe(tuple(map(Term, sources, weights)), 1.0 if options.sum else _divisor(weights))


def _divisor(weights: Sequence[float]) -> float:
    """Return the sum of weights; UsageError for one that only rounding tells from 0, or infinite.

    Divided by such, numbers would be noise or zeros.
    """
    sizes = sum(map(abs, weights))
    total = fsum(weights) if isfinite(sizes) else 0.0  # the same in every Python
    if abs(total) <= _NOISE * sizes:
        about = "0" if isfinite(sizes) else "no finite number"
        raise UsageError(
            f"--weights: they add up to {about}, by which an average is divided",
            hint="such as --weights 1,2,1; --sum in place of --average takes weights as they are",
        )
    return total


def _newest(sources: Sequence[Location], count: int) -> list[Location]:
    """Return the newest complete steps of a run, the oldest first."""
    from ckptool.commands.options.verify import VerifyOptions
    from ckptool.commands.runs.assessment import Assessor
    from ckptool.commands.runs.order import open_run

    if len(sources) != 1:
        raise UsageError(f"--last: needs one SRC, the folder of a run, {len(sources)} are given")
    run = open_run(sources[0])
    assessor, paths = Assessor(run, VerifyOptions(quick=True)), list[Location]()
    for step in reversed(run.steps):
        if len(paths) < count and assessor.assess(step).report.goes_on:
            paths.append(step.path)
    if len(paths) < count:
        raise UsageError(
            f"--last {count}: {sources[0]} has {plural(len(paths), 'complete step')} of"
            f" {len(run.steps):,}",
            hint=f"`ckptool inspect {sources[0]}` lists them",
        )
    return paths[::-1]


def _base(sources: Sequence[Location], options: ExpressionOptions) -> Location:
    """Return the one checkpoint into which an adapter is folded, or of which parts are replaced."""
    bases = [*sources, *([] if options.onto is None else [options.onto])]
    if options.lora is None and not (options.take or options.rows):
        raise UsageError(
            "no operation is given", hint=f"say {_WAYS}: `ckptool help merge` has examples"
        )
    if len(bases) != 1:
        way = f"{'--take' if options.take else '--rows'}: needs one SRC, whose tensors it changes"
        if options.lora is not None:
            way = "--lora: needs one base"
        raise UsageError(
            f"{way}, {len(bases)} are given",
            hint=None if options.lora is None else "ckptool merge OUT --lora ADAPTER --onto BASE",
        )
    return bases[0]


def _sum_terms(sources: Sequence[Location], options: ExpressionOptions) -> tuple[Term, ...]:
    if sources:
        raise UsageError(
            f"{sources[0]}: --add and --minus take no SRC beside their own",
            hint="--onto BASE names what they are added to",
        )
    pairs = ((options.onto, 1.0), (options.add, options.scale), (options.minus, -options.scale))
    terms = tuple(Term(place, weight) for place, weight in pairs if place is not None)
    if len(terms) == 1 and (options.minus is not None or options.scale == 1):
        way, what = ("--add", "added to") if options.minus is None else ("--minus", "taken from")
        raise UsageError(
            f"{way} {terms[0].place}: {what} nothing",
            hint=f"ckptool merge OUT --onto BASE {way} {terms[0].place}; of two checkpoints,"
            " --add A --minus B is the difference",
        )
    return terms


def _delta_base(sources: Sequence[Location], options: ExpressionOptions) -> Term:
    """Return what deltas are applied to."""
    if options.onto is None or not sources:
        lacking = "--onto BASE, what they change" if sources else "a SRC or more, the deltas"
        raise UsageError(
            f"--apply-delta: needs {lacking}",
            hint="ckptool merge OUT --apply-delta DELTA1 DELTA2 --onto BASE",
        )
    if options.onto in sources:
        raise UsageError(f"--onto {options.onto}: is one of the deltas, too")
    return Term(options.onto)


def _average_terms(sources: Sequence[Location], decay: float) -> tuple[Term, ...]:
    """Return the terms of an exponential moving average, which begins with the first."""
    if not 0 < decay < 1:
        raise UsageError(f"--ema {decay}: between 0 and 1", hint="such as --ema 0.9")
    last = len(sources) - 1
    weights = [(1 - decay if at else 1) * decay ** (last - at) for at in range(len(sources))]
    return tuple(map(Term, sources, weights))


def _require_used(options: ExpressionOptions, flags: Sequence[str]) -> None:
    """Raise UsageError for an option that belongs to another way."""
    if options.weights and not {*flags} & {"--average", "--sum"}:
        raise UsageError("--weights: only with --average or --sum")
    if options.last is not None and not {*flags} & {"--average", "--sum", "--ema"}:
        raise UsageError("--last: only with --average, --sum or --ema")
    if options.rows and flags:
        raise UsageError(
            f"--rows: not with {flags[0]}",
            hint="append them to what that writes, or to each SRC before",
        )
    if options.scale != 1 and flags != ["--add"]:
        raise UsageError("--scale: only with --add or --minus")
    if options.onto is not None and flags not in ([], ["--add"], ["--lora"], ["--apply-delta"]):
        raise UsageError(f"--onto: not with {flags[0]}, which starts from its first SRC")


def _rows(options: ExpressionOptions) -> tuple[Rows, ...]:
    """Return how many rows tensors are to have; UsageError without a rule to fill them."""
    if (options.fill is None) != (not options.rows):
        raise UsageError("--rows and --fill: one needs the other", hint=ROWS)
    if options.fill is None:
        return ()
    fill = _fill_of(options.fill)
    return tuple(Rows(name, count, fill) for name, count in options.rows)


def _fill_of(rule: str) -> str | int:
    """Return the rule, or the number of the row that is copied; UsageError for another rule."""
    if rule in (MEAN, ZEROS):
        return rule
    row = parse_whole(rule.removeprefix(_COPIED)) if rule.startswith(_COPIED) else None
    if row is None:
        raise UsageError(f"invalid --fill {rule!r}", hint=f"{MEAN}, {ZEROS} or {_COPIED}ROW")
    return row
