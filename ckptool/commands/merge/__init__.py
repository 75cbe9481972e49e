"""Checkpoints as operands: averages, differences and splices, computed as they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.convert import named_writer, own_writer, plan_conversion
from ckptool.commands.merge.deltas import apply_deltas, require_as_stored
from ckptool.commands.merge.expressions import Computation, Expression, add, copy
from ckptool.commands.merge.lora import fold
from ckptool.commands.merge.operands import Operand, join, model_only, open_operands
from ckptool.commands.merge.recipe import Recipe, read_recipe
from ckptool.commands.merge.rows import append_rows
from ckptool.commands.merge.splices import Splice
from ckptool.commands.merge.vocabulary import notes_on_configs, require_same_tokens
from ckptool.commands.open import OpenedCheckpoint, no_collecting
from ckptool.commands.options.declaration import changed
from ckptool.commands.options.merge import MergeOptions
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import MapOptions, RewriteOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions
from ckptool.commands.reshard.reshard import plan_reshard
from ckptool.commands.rewrite import RewriteResult, cast_catalog
from ckptool.commands.transfer.rewritten import (
    Matched,
    RewrittenReport,
    excluding_options,
    exclusions,
    matches_of,
)
from ckptool.commands.transfer.target import require_apart, resolve_target
from ckptool.commands.transfer.transfer import Transfer
from ckptool.engine.formulas.weighted import WeightedSum
from ckptool.errors import UsageError
from ckptool.formats.companions import join_catalogs
from ckptool.storage.url import Location

_TEXTS = {"--metadata", "--drop-metadata"}
"""Options for what only safetensors files of a model hold."""


class MergeReport(RewrittenReport, frozen=True, kw_only=True):
    """A merge, planned or done.

    ``sources`` are the checkpoints by the labels by which ``expressions`` name them, which say what
    each tensor is.
    """

    schema: ClassVar = "merge"

    sources: dict[str, Location]
    expressions: tuple[Expression, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors there are of each expression."""
        return dict(Counter(expression.text for expression in self.expressions))


class Merged(Struct, frozen=True):
    """The checkpoints of a recipe as one, which has the computed tensors: nothing is written yet.

    ``rewritten`` is the same after the casts that were asked for; ``matched`` is what patterns mean
    in all sources, ``excluded`` what the first one has besides, ``decided`` what the adapter's
    config decides.
    """

    opened: OpenedCheckpoint
    rewritten: RewriteResult
    sources: dict[str, Location]
    expressions: tuple[Expression, ...]
    matched: Sequence[Matched] = ()
    excluded: tuple[str, ...] = ()
    decided: object = None


@no_collecting()
def prepare_merge(
    sources: Sequence[Location], target: Location, options: MergeOptions
) -> Transfer[MergeReport]:
    """Plan a merge; nothing is written and no tensor is read yet."""
    target, how = resolve_target(target), options.convert
    recipe = read_recipe(sources, options.expression)
    writer = named_writer(how.to, target) if options.mesh is None else None
    merged = open_merged(recipe, how.read, how.rewrite, target)
    transfer: Transfer[Any]
    if options.mesh is None:
        writer = writer or own_writer(merged.opened, target)
        transfer = plan_conversion(merged.opened, merged.rewritten, writer, target, how)
    else:
        transfer = _plan_for_mesh(merged, target, options)
    common = {name: getattr(transfer.report, name) for name in RewrittenReport.__struct_fields__}
    casts = [match for match in common["matched"] if match.option == "--dtype"]
    common |= {"matched": (*merged.matched, *casts), "excluded": merged.excluded}
    report = MergeReport(
        **common,
        sources=merged.sources,
        expressions=merged.expressions,
    )
    decided = transfer.decided, recipe, merged.decided
    return Transfer(merged.opened, transfer.plan, target, how.transfer, report, decided)


def _plan_for_mesh(merged: Merged, target: Location, options: MergeOptions) -> Transfer[Any]:
    """Plan to write the result for a mesh; it is renamed and mapped already."""
    how = options.convert
    rest = ConvertOptions(how.to, how.read, how.rewrite, transfer=how.transfer)
    if flags := sorted({*changed(how)} - {*changed(rest)}) or _TEXTS & {*changed(how.rewrite)}:
        raise UsageError(f"{min(flags)}: not with --mesh, whose formats have no such thing")
    rewriting = RewriteOptions(
        casts=how.rewrite.casts, map=MapOptions(assets=how.rewrite.map.assets)
    )
    resharding = ReshardOptions(
        mesh=options.mesh, to=how.to, read=how.read, rewrite=rewriting, transfer=how.transfer
    )
    return plan_reshard(merged.opened, target, resharding)


def open_merged(
    recipe: Recipe, read: ReadOptions, rewriting: RewriteOptions, target: Location | None = None
) -> Merged:
    """Open the checkpoints of a recipe, and compute its tensors.

    Each is rewritten by itself, and the result is cast. Raises UsageError if the target is in one
    of them, Unsupported if they do not fit, and the errors of opening.
    """
    because = excluding_options(rewriting.selection)
    if not (recipe.with_optimizer or rewriting.selection.model_only):
        rest = "all else" if because else "all"
        because += f"{'; ' if because else ''}--with-optimizer keeps {rest}"
        rewriting = model_only(rewriting)
    if recipe.deltas:
        require_as_stored(rewriting)
    operands = open_operands(recipe, read, rewriting)
    for operand in operands.values():
        if target is not None:
            require_apart(operand.opened, target)
    computation = compute(recipe, operands, rewriting.map.assets)
    opened, rewritten = _as_one(operands, computation, rewriting)
    sources = dict[str, Location]()
    for place, operand in operands.items():
        sources.setdefault(operand.label, place)
    places = [*(term.place for term in recipe.terms), *(take.place for take in recipe.takes)]
    wholes = [operands[place].rewritten.whole for place in places]
    matched = matches_of(join_catalogs(*wholes), rewriting.selection)
    expressions, decided = computation.expressions, computation.decided
    first = next(iter(operands.values())).rewritten
    excluded = exclusions(first.whole, first.kept, because)
    return Merged(opened, rewritten, sources, expressions, matched, excluded, decided)


def compute(
    recipe: Recipe, operands: Mapping[Location, Operand], assets: Path | None
) -> Computation:
    """Compute the tensors of a recipe from its checkpoints; Unsupported if they do not fit."""
    terms = [operands[term.place] for term in recipe.terms]
    if recipe.lora is not None:
        computation = fold(terms[0], operands[recipe.lora], assets)
    elif recipe.deltas:
        computation = apply_deltas(terms[0], [operands[place] for place in recipe.deltas])
    elif recipe.is_plain:
        computation = copy(terms[0])
    else:
        weights = tuple(term.weight for term in recipe.terms)
        text = recipe.text([operand.label for operand in terms])
        computation = add(terms, WeightedSum(weights, recipe.divisor), text)
        require_same_tokens(terms, assets)
        computation = replace(computation, notes=tuple(notes_on_configs(terms, assets)))
    if recipe.takes:
        splice = Splice(computation, terms[0])
        for take in recipe.takes:
            splice.take(take.name, operands[take.place])
        computation = splice.result(assets)
    return append_rows(computation, recipe.rows)


def _as_one(
    operands: Mapping[Location, Operand], computation: Computation, options: RewriteOptions
) -> tuple[OpenedCheckpoint, RewriteResult]:
    """Return all checkpoints as one, which has the computed tensors, and these cast as asked.

    Its files are those of all; what is beside the tensors is the first one's.
    """
    first = next(iter(operands.values()))
    files = {n: size for operand in operands.values() for n, size in operand.catalog.files.items()}
    notes = dict.fromkeys(note for operand in operands.values() for note in operand.catalog.notes)
    notes |= dict.fromkeys(computation.notes)
    catalog = replace(computation.catalog, files=files, notes=tuple(notes))
    opened = OpenedCheckpoint(first.opened.path, join(operands), first.opened.format, catalog)
    counts = dict[str, int]()
    if options.casts is not None:
        catalog, counts = cast_catalog(opened, catalog, options.casts, options.map.assets)
    result = replace(first.rewritten, options=options, whole=catalog, kept=catalog)
    return opened, replace(result, catalog=catalog, cast=counts)
