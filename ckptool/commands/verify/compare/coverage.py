"""How much of a checkpoint was compared, and what was excluded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint, require_sound
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.rewrite import RewriteResult, rewrite
from ckptool.commands.verify.compare.names import (
    Counterpart,
    counterpart,
    differing_texts,
    selected_by,
)
from ckptool.commands.verify.findings import Finding
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import short_name
from ckptool.core.selection import is_used, meant_by, names_of
from ckptool.core.state_category import optimizer_names, state_category, with_every_part
from ckptool.core.text import plural
from ckptool.engine.check.pairs import TensorPair
from ckptool.errors import Problem
from ckptool.serialization.safetensors_metadata import texts_of
from ckptool.storage.url import Location

NOT_COMPARED = "tensor-not-compared"


class Amount(Struct, frozen=True):
    """A number of tensors with their bytes, and a number of values."""

    tensors: int = 0
    nbytes: int = 0
    values: int = 0

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            self.tensors - other.tensors, self.nbytes - other.nbytes, self.values - other.values
        )

    def __str__(self) -> str:
        """Return text such as ``102 tensors (17,039,496 bytes) and 16 values``."""
        tensors = f"{plural(self.tensors, 'tensor')} ({self.nbytes:,} bytes)"
        parts = [tensors] if self.tensors else []
        parts += [plural(self.values, "value")] if self.values else []
        return " and ".join(parts) or "nothing"


class Coverage(Struct, frozen=True):
    """What was compared, of everything that one side has."""

    compared: Amount
    total: Amount

    @property
    def rest(self) -> Amount:
        """Return what was not compared."""
        return self.total - self.compared


class Alignment(Struct, frozen=True):
    """The ``result`` of rewriting a checkpoint, and the part of another one to compare it with.

    ``notes`` are remarks on what of either is not compared, ``differences`` are of what a manifest
    does not record: texts in headers.
    """

    result: RewriteResult
    counterpart: Counterpart
    notes: list[Problem]
    differences: list[Problem]


def align(
    opened: OpenedCheckpoint, rewriting: RewriteOptions, other: Catalog, other_path: Location
) -> Alignment:
    """Rewrite a checkpoint, and choose the part of another one to compare. No tensor byte is read.

    A pattern to drop may match only in the other one. Raises as ``rewrite`` does.
    """
    names, other_names, selection = names_of(opened.catalog), names_of(other), rewriting.selection
    drop = [
        pattern
        for pattern in selection.drop
        if is_used(pattern, names, other_names) or not is_used(pattern, other_names, names)
    ]
    keys, other_keys = texts_of(opened.catalog), texts_of(other)
    texts = [p for p in rewriting.drop_metadata if is_used(p, keys) or not is_used(p, other_keys)]
    chosen = replace(selection, drop=tuple(drop))
    options = replace(rewriting, selection=chosen, drop_metadata=tuple(texts))
    result = rewrite(opened, options, check=require_sound)
    optimizer = optimizer_names(with_every_part(other)) if selection.no_optimizer else ()
    is_selected = selected_by(selection, {*names, *other_names}, optimizer)
    part = counterpart(other, result.catalog, is_selected, model_only=selection.model_only)
    notes = excluded_by_rewrite(result, opened.path)
    notes += excluded(other_path, part.excluded, part.excluded_values)
    is_dropped = meant_by(rewriting.drop_metadata, {*keys, *other_keys})
    differing = differing_texts(result.catalog, part.catalog, is_dropped)
    return Alignment(result, part, notes, [*differing])


def amount(tensors: Iterable[TensorEntry], values: int = 0) -> Amount:
    """Return the amount of tensors and values, in bytes of the source's files."""
    sizes = [entry.elements * entry.source_dtype.itemsize for entry in tensors]
    return Amount(len(sizes), sum(sizes), values)


def rewritten_coverage(result: RewriteResult, names: Collection[str], values: int) -> Coverage:
    """Return how much of a checkpoint was compared, if ``names`` of its rewritten tensors were.

    Tensors that a key map joins or splits count as their sources.
    """
    total = amount(result.whole.tensors.values(), len(result.whole.objects))
    selection, key_map, sources = result.kept, result.map, set(names)
    if key_map is not None:
        dropped = sum(name in selection.objects for name in key_map.excluded)
        lacking = len(result.catalog.objects) - values
        values = max(0, len(selection.objects) - dropped - lacking)
        sources = {name for move in key_map.moves if move.target in names for name in move.sources}
    compared = [selection.tensors[name] for name in sources if name in selection.tensors]
    return Coverage(amount(compared, values), total)


def excluded_by_rewrite(result: RewriteResult, path: object) -> list[Problem]:
    """Return remarks on what the selection and the map exclude."""
    whole, selection, key_map = result.whole, result.kept, result.map
    # a tensor that is renamed keeps its chunks
    chunk_ids = {id(entry.chunks) for entry in selection.tensors.values()}
    entries = [entry for entry in whole.tensors.values() if id(entry.chunks) not in chunk_ids]
    notes = excluded(path, entries, len(whole.objects) - len(selection.objects))
    if key_map is not None:
        by_map = [selection.tensors[name] for name in key_map.excluded if name in selection.tensors]
        rest = len(key_map.excluded) - len(by_map)
        if by_map or rest:
            what = f"{amount(by_map, rest)} of {path} excluded by the map {key_map.name}"
            notes.append(Problem(what, "excluded"))
        unpadded = [move for move in key_map.moves if "unpad" in move.operation]
        if unpadded:
            what = f"the padding of {plural(len(unpadded), 'tensor')} of {path} is cut off"
            example = f"such as {unpadded[0].target}: {unpadded[0].operation}"
            notes.append(Problem(f"{what}, {example}", "excluded"))
    return notes


def excluded(path: object, tensors: Collection[TensorEntry], values: int) -> list[Problem]:
    """Return the remark that tensors and values of a checkpoint were excluded, if any were."""
    if not tensors and not values:
        return []
    categories = Counter(state_category(entry) for entry in tensors)
    counts = ", ".join(f"{count:,} {category}" for category, count in categories.most_common())
    of = f": {counts} tensors" if counts else ""
    return [Problem(f"excluded: {amount(tensors, values)} of {path}{of}", "excluded")]


def catalog_coverage(catalog: Catalog, names: Collection[str], values: int) -> Coverage:
    """Return how much of a checkpoint was compared, if ``names`` of its tensors were."""
    total = amount(catalog.tensors.values(), len(catalog.objects))
    compared = amount((catalog.tensors[name] for name in names), values)
    return Coverage(compared, total)


def list_unread(failing: list[Finding]) -> set[str]:
    """Return the tensors that were not compared, if nothing else is wrong."""
    if {finding.code for finding in failing} != {NOT_COMPARED}:
        return set()
    return {name for finding in failing for name in finding.names}


def cast_text(pairs: Sequence[TensorPair], beyond: int) -> str:
    """Return the words on how many of equal pairs were cast before they were compared.

    ``beyond`` is how many values were beyond the range of the type.
    """
    cast = (pair.one for pair in pairs if pair.one.dtype != pair.one.source_dtype)
    counts = Counter(short_name(entry.dtype.name) for entry in cast)
    text = "".join(f", {n:,} of them after a cast to {name}" for name, n in counts.items())
    if count := sum(pair.is_cast for pair in pairs):
        text = f", {count:,} of them cast to the coarser type of both"
    return f"{text} ({plural(beyond, 'value')} beyond its range)" if beyond else text
