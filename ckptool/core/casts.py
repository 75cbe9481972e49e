"""Casts of tensors: the model's weights, and tensors that globs select."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Computed, TensorEntry
from ckptool.core.dtype import BY_NAME, SATURATES, DType, parse_dtype
from ckptool.core.quantization.names import is_packed, quantized_names
from ckptool.core.quantization.scale_names import Scales, is_coarse, may_be_codes
from ckptool.core.selection import matching_names, meant_by, unmatched
from ckptool.core.state_category import state_category
from ckptool.core.text import list_some, plural
from ckptool.errors import Unsupported, UsageError

_FEW = 3


class Casts(Struct, frozen=True):
    """The type for the ``model``'s weights, and ``rules`` of a name or glob and a type.

    The first rule that means a name decides, whatever the tensor is.
    """

    model: DType | None = None
    rules: tuple[tuple[str, DType], ...] = ()

    def dtypes_for(
        self, entries: Mapping[str, TensorEntry], names: Container[str]
    ) -> dict[str, DType | None]:
        """Return the types to cast tensors to; None if none was requested.

        ``names`` are the names of all tensors, any of which a rule may name.
        """
        rules = [(meant_by([pattern], names), dtype) for pattern, dtype in self.rules]

        def choose(entry: TensorEntry) -> DType | None:
            default = self.model if state_category(entry) == "model" else None
            return next((dtype for is_meant, dtype in rules if is_meant(entry.name)), default)

        return {name: choose(entry) for name, entry in entries.items()}


def parse_casts(texts: Sequence[str]) -> Casts:
    """Parse ``bf16`` and ``NAME=bf16``; UsageError if they conflict."""
    model: DType | None = None
    rules: list[tuple[str, DType]] = []
    for text in texts:
        glob, equals, name = text.rpartition("=")
        dtype = parse_dtype(name.strip())
        if equals and not glob.strip():
            raise UsageError(f"invalid --dtype {text!r}: expected DTYPE or NAME=DTYPE")
        if equals:
            rules.append((glob.strip(), dtype))
        elif model is not None and model != dtype:
            raise UsageError(
                f"--dtype {model} conflicts with --dtype {dtype}",
                hint=f"use --dtype 'NAME={dtype}' to cast matching tensors only",
            )
        else:
            model = dtype
    return Casts(model, tuple(rules))


class CastResult(Struct, frozen=True):
    """A catalog with its casts, the changed entries as they were before, and notes."""

    catalog: Catalog
    changed: tuple[TensorEntry, ...]
    notes: tuple[str, ...]


def cast(catalog: Catalog, casts: Casts) -> CastResult:
    """Cast floating tensors as requested.

    Integers, tensors without dims (such as step counters), and quantized tensors and their scales
    are never cast. Raises UsageError if a glob matches nothing that can be cast, Unsupported for
    floats of 8 bits and less beside a possible scale, and for a possible scale of integers.
    """
    quantized = quantized_names(catalog)
    castable = {n: e for n, e in catalog.tensors.items() if can_cast(e) and n not in quantized}
    _require_used(catalog, casts, castable)
    dtypes = casts.dtypes_for(castable, catalog.tensors)
    tensors, changed, scales = dict(catalog.tensors), [], Scales(catalog.tensors)
    for name, dtype in dtypes.items():
        if dtype is not None and dtype != castable[name].dtype:
            scales.require_none(castable[name])
            tensors[name] = as_type(castable[name], dtype)
            changed.append(castable[name])
    _require_no_scales(catalog, changed, scales, quantized)
    notes = _uncast_notes(catalog, casts, dtypes)
    return CastResult(catalog.with_tensors(tensors), tuple(changed), notes)


def require_scales(whole: Catalog, selection: Catalog, casts: Casts) -> None:
    """Raise Unsupported if floats of 8 bits are to be cast without a scale that was excluded.

    ``selection`` is what is left of the ``whole``, maybe renamed: entries have the same chunks.
    """
    coarse = {n: e for n, e in selection.tensors.items() if can_cast(e) and is_coarse(e)}
    if not coarse:
        return
    quantized, dtypes = quantized_names(selection), casts.dtypes_for(coarse, selection.tensors)
    former, scales = {id(e.chunks): e for e in whole.tensors.values()}, Scales(whole.tensors)
    for name, entry in coarse.items():
        if name not in quantized and dtypes[name] not in (None, entry.dtype):
            scales.require_none(former.get(id(entry.chunks), entry))


def _require_no_scales(
    catalog: Catalog, changed: Sequence[TensorEntry], scales: Scales, quantized: Container[str]
) -> None:
    """Raise Unsupported if a tensor to cast may be a scale of packed integers or coarse floats."""
    cast_names = {entry.name for entry in changed}
    for entry, scale in scales_of_codes(catalog, scales, quantized):
        if scale in cast_names:
            raise Unsupported(
                f"{scale}: may be the scale of {entry.name} ({entry.dtype}), of an unknown kind:"
                " a cast would round it",
                hint="leave --dtype out to keep both as they are",
            )


def scales_of_codes(
    catalog: Catalog, scales: Scales, quantized: Container[str]
) -> Iterator[tuple[TensorEntry, str]]:
    """Yield tensors that may be codes, beside the known ``quantized`` ones, with their scale."""
    for name, entry in catalog.tensors.items():
        is_float = can_cast(entry) and is_coarse(entry)
        if name in quantized or not (is_float or (is_packed(entry) and may_be_codes(name))):
            continue
        if scale := scales.of(name):
            yield entry, scale


def can_cast(entry: TensorEntry) -> bool:
    """Return whether a tensor has floating-point elements and dims."""
    return entry.dtype.kind == "float" and bool(entry.shape)


def needs_torch(stored: DType, target: DType) -> bool:
    """Return whether only torch can cast one floating type to the other: 8 bits or fewer."""
    return stored != target and not (_is_wide(stored) and _is_wide(target))


def _is_wide(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize > 1


def as_type(entry: TensorEntry, dtype: DType) -> TensorEntry:
    """Return a tensor with another dtype; computed numbers are rounded only once."""
    return replace(entry, dtype=dtype, stored=None if is_computed(entry) else entry.source_dtype)


def coarser(one: DType, other: DType) -> DType:
    """Return the type of two to which the other is rounded; ``other`` if sizes are equal."""
    return one if one.itemsize < other.itemsize else other


def is_computed(entry: TensorEntry) -> bool:
    """Return whether numbers are computed in the type that they have, as in quantized tensors."""
    return bool(computed_places(entry))


def computed_places(entry: TensorEntry) -> list[Computed]:
    """Return where a tensor is computed of others.

    Only chunks in a tuple are examined: chunks of tables are places in files.
    """
    chunks = entry.chunks if isinstance(entry.chunks, tuple) else ()
    return [chunk.at for chunk in chunks if isinstance(chunk.at, Computed)]


def stored_tensors(entry: TensorEntry) -> Iterator[TensorEntry]:
    """Yield the stored tensors that a tensor is read from: itself, or those it is computed of."""
    parts = {id(part): part for at in computed_places(entry) for part in at.stored}
    if not parts:
        yield entry
    for part in parts.values():
        yield from stored_tensors(part)


def is_in_order(entry: TensorEntry) -> bool:
    """Return whether one thread is to read all boxes of a tensor, in order."""
    return any(at.kept > 0 for at in computed_places(entry))


RangeCounts = Counter[tuple[str, str, str]]
"""The count of numbers beyond a type's range, by tensor, type, and what they became."""


def widest_type(at: Computed) -> DType:
    """Return the type whose range computed numbers have before they are cast.

    It is the widest type of the tensors they are computed of, and at least float32; float64 if the
    numbers may exceed these.
    """
    is_wide = at.exceeds or any(entry.source_dtype == BY_NAME["float64"] for entry in at.stored)
    return BY_NAME["float64" if is_wide else "float32"]


def narrows(entry: TensorEntry) -> bool:
    """Return whether a cast of a tensor may make finite numbers infinite.

    Computed numbers mostly have 32 bits before the cast; bf16 then has the same range.
    """
    largest, single = entry.dtype.part.largest, BY_NAME["float32"]
    types = [widest_type(at) for at in computed_places(entry)]
    if not types:
        return largest < entry.source_dtype.part.largest
    return any(largest < (BY_NAME["bfloat16"] if t == single else t).largest for t in types)


def beyond_notes(counts: RangeCounts) -> list[str]:
    """Note how many numbers exceed the range of each type."""
    notes = []
    for target, outcome in sorted({(target, outcome) for _, target, outcome in counts}):
        names = sorted(name for name, *rest in counts if rest == [target, outcome])
        total = sum(counts[name, target, outcome] for name in names)
        origin = "" if target == SATURATES else "finite before, "
        narrow = BY_NAME[target].part.largest < BY_NAME["bfloat16"].largest
        advice = "; --dtype bf16 keeps them finite" if narrow else ""
        notes.append(
            f"{plural(total, 'value')} of {_summarize(names)} became {outcome} in {target}:"
            f" {origin}beyond its range{advice}"
        )
    return notes


def uncounted_notes(entries: Iterable[TensorEntry]) -> list[str]:
    """Note that numbers that casts make infinite are not counted."""
    types = sorted({entry.dtype.name for entry in entries if narrows(entry)})
    return [
        f"--no-verify: values beyond the range of {name} become {beyond(name)} uncounted"
        for name in types
    ]


def beyond(dtype: str) -> str:
    """Return what numbers beyond the range of a type become in it."""
    if dtype == SATURATES:
        return "its largest or NaN"
    return "infinite" if BY_NAME[dtype].largest else "NaN"


def _require_used(catalog: Catalog, casts: Casts, castable: Mapping[str, TensorEntry]) -> None:
    for glob, dtype in casts.rules:
        matched = matching_names(catalog.tensors, glob)
        if not castable.keys().isdisjoint(matched):
            continue
        if matched:
            raise UsageError(
                f"--dtype {glob!r}={dtype}: cannot cast {matched[0]}",
                hint="integers, scalars and quantized tensors are never cast",
            )
        raise unmatched("--dtype", glob, catalog.tensors, "tensor")


def _uncast_notes(
    catalog: Catalog, casts: Casts, dtypes: Mapping[str, DType | None]
) -> tuple[str, ...]:
    """Note the floating tensors of other types to which the model's dtype does not apply."""
    if casts.model is None:
        return ()
    floating = (e for e in catalog.tensors.values() if e.dtype.kind == "float")
    entries = [entry for entry in floating if entry.dtype != casts.model]
    names = [e.name for e in entries if e.name in dtypes and dtypes[e.name] is None]
    scalars = [e.name for e in entries if not e.shape and state_category(e) == "model"]
    notes = []
    if names:
        notes.append(
            f"--dtype {casts.model} casts model weights only; not cast:"
            f" {_summarize(names)}; use --dtype 'NAME={casts.model}' to cast them"
        )
    if scalars:
        notes.append(f"not cast (scalars): {_summarize(scalars)}")
    return tuple(notes)


def _summarize(names: Sequence[str]) -> str:
    return f"{plural(len(names), 'tensor')} ({list_some(names, _FEW)})"
