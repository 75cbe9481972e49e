"""Compute the tensors of a merge: catalogs in, a catalog of computed tensors out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.merge.operands import Operand
from ckptool.core.box import Box, row_major_strides
from ckptool.core.casts import can_cast, is_computed, scales_of_codes
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Compute,
    Computed,
    Reads,
    StridedPart,
    TensorEntry,
    tied_names,
)
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.names import quantized_names
from ckptool.core.quantization.scale_names import Scales
from ckptool.core.text import list_some, plural
from ckptool.engine.formulas.weighted import WeightedSum, same_box
from ckptool.errors import Unsupported

_FEW = 3


class Expression(Struct, frozen=True):
    """What a tensor of the result is, in words, such as ``(A + B) / 2``."""

    name: str
    text: str


class Computation(Struct, frozen=True):
    """The result of a merge as a catalog, what each of its tensors is, and remarks on it.

    ``decided`` is what decides the tensors beyond the recipe.
    """

    catalog: Catalog
    expressions: tuple[Expression, ...]
    notes: tuple[str, ...] = ()
    decided: object = None


def add(operands: Sequence[Operand], total: WeightedSum, text: str) -> Computation:
    """Add up each tensor of real or complex numbers of checkpoints, which must have the same.

    Integers, booleans, tensors without dims, values, and what is no part of model or optimizer are
    those of the first, and so are steps; names of one tensor stay that. Raises Unsupported for
    other names, shapes or ties, and for tensors that are quantized or complex.
    """
    first, *rest = operands
    for operand in operands:
        require_numbers(operand)
    ties = tied_names(first.catalog)
    for operand in rest:
        _require_alike(first, operand)
        _require_same_ties(ties, first, operand)
    shared = {name: names[0] for names in ties for name in names[1:]}
    tensors, expressions = dict[str, TensorEntry](), list[Expression]()
    for name, entry in first.catalog.tensors.items():
        is_summed = _is_summed(entry)
        if is_summed:
            parts = [entry, *(operand.catalog.tensors[name] for operand in rest)]
            twin = tensors.get(shared.get(name, ""))
            result = computed(entry, parts, total, same_box, exceeds=total.exceeds, in_pieces=True)
            entry = result if twin is None else replace(result, chunks=twin.chunks)
        tensors[name] = entry
        expressions.append(Expression(name, text if is_summed else first.label))
    return Computation(first.catalog.with_tensors(tensors), tuple(expressions))


def copy(operand: Operand) -> Computation:
    """Return the tensors of a checkpoint as they are."""
    expressions = tuple(Expression(name, operand.label) for name in operand.catalog.tensors)
    return Computation(operand.catalog, expressions)


def computed(
    template: TensorEntry,
    parts: Iterable[TensorEntry],
    compute: Compute,
    reads: Reads,
    memory: int = 0,
    *,
    exceeds: bool = False,
    in_pieces: bool = False,
) -> TensorEntry:
    """Return a tensor of the shape and type of a ``template`` that is computed of ``parts``.

    It ``exceeds`` if its numbers may be beyond the range of theirs; a thread keeps ``memory``
    bytes. Parts that are computed themselves, as of quantized tensors, are not rounded to their
    type, and are whole in memory: nothing is computed ``in_pieces`` of them.
    """
    wide = BY_NAME["float32"]
    inputs = tuple(replace(entry, dtype=wide) if is_computed(entry) else entry for entry in parts)
    part = StridedPart(template.shape, 0, row_major_strides(template.shape, 1))
    at = Computed(
        inputs,
        part,
        compute,
        reads=reads,
        kept=memory,
        exceeds=exceeds,
        in_pieces=in_pieces and not any(map(is_computed, inputs)),
    )
    chunk = Chunk(Box.whole(template.shape), at)
    return replace(template, chunks=(chunk,), placements=None, mesh=None, stored=None)


def require_numbers(operand: Operand, names: Iterable[str] | None = None) -> None:
    """Raise Unsupported if tensors are quantized: their codes are no numbers to compute with.

    Of an unknown kind, what may be codes or their scale is refused, too.
    """
    catalog, path = operand.catalog, operand.opened.path
    quantized = quantized_names(catalog)
    names = set(catalog.tensors if names is None else names)
    if codes := quantized & names:
        raise Unsupported(
            f"{path}: {plural(len(codes), 'tensor')} quantized"
            f" ({list_some(sorted(codes), _FEW)}), which have no sum",
            hint="--dequantize computes with the numbers that they stand for",
        )
    for entry, scale in scales_of_codes(catalog, Scales(catalog.tensors), quantized):
        if not names.isdisjoint((entry.name, scale)):
            raise Unsupported(
                f"{path}: {scale} may be the scale of {entry.name} ({entry.dtype}), of an unknown"
                " kind: such codes have no sum",
                hint="what quantized it can save it in full;"
                f" --drop '{entry.name}' --drop '{scale}' leaves both out",
            )


def _is_summed(entry: TensorEntry) -> bool:
    """Return whether a tensor has dims, and real or complex numbers, and is no counter or such."""
    is_step = entry.part == "optimizer" and entry.name.rpartition(".")[2] == "step"
    if is_step or entry.part == "other":
        return False
    return can_cast(entry) or (entry.dtype.kind == "complex" and bool(entry.shape))


def _require_alike(first: Operand, other: Operand) -> None:
    """Raise Unsupported if two checkpoints do not have the same tensors."""
    ours, theirs = first.catalog.tensors, other.catalog.tensors
    sides = ((first, ours, other, theirs), (other, theirs, first, ours))
    for one, has, another, lacks in sides:
        if missing := [name for name in has if name not in lacks]:
            raise Unsupported(
                f"{another.opened.path}: lacks {len(missing):,} of {plural(len(has), 'tensor')} of"
                f" {one.opened.path}: {list_some(missing, _FEW)}",
                hint=f"`ckptool diff {first.opened.path} {other.opened.path}` shows all;"
                " --rename or --map makes names equal, --drop leaves tensors out",
            )
    for name, entry in ours.items():
        twin = theirs[name]
        if twin.shape != entry.shape:
            raise Unsupported(
                f"{name}: {list(entry.shape)} in {first.opened.path},"
                f" {list(twin.shape)} in {other.opened.path}",
                hint=_hint_on_shapes(entry, twin),
            )
        is_summed = _is_summed(entry) or _is_summed(twin)
        if is_summed and twin.dtype.kind != entry.dtype.kind:
            raise Unsupported(
                f"{name}: {entry.dtype} in {first.opened.path}, {twin.dtype} in"
                f" {other.opened.path}",
                hint=f"--drop '{name}' leaves it out",
            )


def _hint_on_shapes(one: TensorEntry, other: TensorEntry) -> str:
    """Return what makes two shapes one: rows for what one vocabulary has more than the other."""
    left_out, rows = f"--drop '{one.name}' leaves it out", max(one.shape[:1], other.shape[:1])
    if not may_be_grown(one.shape, other.shape):
        return left_out
    grown = how_to_grow("SRC", one.name, *rows)
    return f"where they are vocabularies, {grown} gives the smaller one the same rows; {left_out}"


def may_be_grown(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes may be of one embedding with other numbers of tokens."""
    return len(one) == 2 and one[1:] == other[1:]


def how_to_grow(place: object, name: str, rows: int) -> str:
    """Return the command that gives an embedding more rows."""
    return f"`ckptool merge GROWN {place} --rows '{name}={rows}' --fill mean`"


def _require_same_ties(ties: Sequence[tuple[str, ...]], first: Operand, other: Operand) -> None:
    """Raise Unsupported if names are one tensor in only one of two checkpoints."""
    theirs = tied_names(other.catalog)
    for has, lacks, names in (
        *((first, other, names) for names in ties if names not in theirs),
        *((other, first, names) for names in theirs if names not in ties),
    ):
        raise Unsupported(
            f"{list_some(names, _FEW)}: one tensor in {has.opened.path}, several in"
            f" {lacks.opened.path}",
            hint=f"--drop '{names[-1]}' leaves one out",
        )
