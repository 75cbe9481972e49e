"""Differences of two catalogs besides elements: names, shapes, types, values, and other files."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.model.assets import QUANTIZATION_FILES, QUANTIZATION_KEYS, assets_in
from ckptool.commands.model.records import CONFIG, DTYPE_KEYS, object_in
from ckptool.commands.open import OpenedCheckpoint, Opens
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.options.verify import CompareOptions
from ckptool.commands.rewrite import only_model
from ckptool.commands.verify.compare.values import difference, short_text, value_digest
from ckptool.commands.verify.findings import NOTHING_COMPARED
from ckptool.core.casts import can_cast, stored_tensors
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import short_name
from ckptool.core.quantization.names import is_plain
from ckptool.core.selection import keep_names, meant_by, names_of
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.state_category import state_category, state_category_of_name, weights
from ckptool.core.text import plural
from ckptool.engine.check.digest import file_digests
from ckptool.engine.check.replicas import differing_replicas
from ckptool.engine.read.tensors import CheckedSource
from ckptool.errors import CkptoolError, Damaged, Hostile, Problem, Unsupported
from ckptool.formats import FORMATS
from ckptool.formats.companions import companion_targets
from ckptool.serialization.safetensors_metadata import texts_of
from ckptool.serialization.state_dict.loadable import empty_dicts
from ckptool.serialization.state_dict.values import Repeated
from ckptool.storage.files import Files


class Counterpart(Struct, frozen=True):
    """The part of another checkpoint to compare; ``names`` are its names for these tensors.

    ``excluded`` are its other tensors, ``excluded_values`` counts its other values.
    """

    catalog: Catalog
    names: dict[str, str]
    excluded: tuple[TensorEntry, ...]
    excluded_values: int


def counterpart(
    catalog: Catalog, reference: Catalog, is_selected: Callable[[str], bool], *, model_only: bool
) -> Counterpart:
    """Return the part of a catalog to compare with a ``reference``, which was selected and renamed.

    Names that the selection excludes are not compared, unless the reference has them once renamed.
    """
    targets = {*reference.tensors, *reference.objects, *reference.conflicts}
    similar, names = catalog, {name: name for name in catalog.tensors}
    if model_only:
        similar, names = _model_like(catalog, targets)
    part = keep_names(similar, {*targets, *filter(is_selected, names_of(similar))})
    names = {name: names[name] for name in part.tensors}
    chosen = set(names.values())
    rest = tuple(entry for name, entry in catalog.tensors.items() if name not in chosen)
    return Counterpart(part, names, rest, len(catalog.objects) - len(part.objects))


def selected_by(
    selection: Selection, names: Container[str], optimizer: Container[str]
) -> Callable[[str], bool]:
    """Return a function that tells whether a name is selected and not dropped.

    ``names`` are those that exist, ``optimizer`` those of an optimizer's state.
    """
    is_chosen, is_dropped = (meant_by(p, names) for p in (selection.select, selection.drop))

    def is_selected(name: str) -> bool:
        if (selection.no_optimizer and name in optimizer) or (selection.drop and is_dropped(name)):
            return False
        return not selection.select or is_chosen(name)

    return is_selected


def _model_like(catalog: Catalog, targets: set[str]) -> tuple[Catalog, dict[str, str]]:
    """Return the model's tensors, and the catalog's names for them.

    They have their stored names or the bare ones, whichever more targets have.
    """
    tensors = {n: e for n, e in catalog.tensors.items() if state_category(e) == "model"}
    conflicts = {
        name: why
        for name, why in catalog.conflicts.items()
        if state_category_of_name(name, ()) == "model"
    }
    plain = replace(catalog, tensors=tensors, objects={}, conflicts=conflicts)
    try:
        bare = only_model(catalog)
    except Unsupported:
        return plain, {name: name for name in tensors}
    if len(targets & bare.tensors.keys()) <= len(targets & tensors.keys()):
        return plain, {name: name for name in tensors}
    return bare, dict(zip(bare.tensors, weights(catalog), strict=True))


def differing_names(one: Catalog, other: Catalog) -> Iterator[Problem]:
    """Yield a problem for each tensor and each value that only one side has."""
    for holds, lacks, code, side, other_side in (
        (one, other, "missing", "A", "B"),
        (other, one, "extra", "B", "A"),
    ):
        for name in holds.tensors:
            if name not in lacks.tensors:
                state = "a value" if name in lacks.objects else "missing"
                state = "not read" if name in lacks.conflicts else state
                message = f"{name}: a tensor in {side}, {state} in {other_side}"
                yield Problem(message, f"tensor-{code}", tensor=name)
        unstored = {*empty_dicts(holds)} if lacks.format == "dcp" else set[str]()
        names = [name for name in holds.objects if name not in unstored and not _has(lacks, name)]
        if names and not lacks.objects and holds_no_values(lacks.format):
            values = plural(len(names), "non-tensor value")
            message = f"{values}, which {lacks.format} cannot hold"
            yield Problem(message, "values-unsupported")
            continue
        for name in names:
            yield Problem(
                f"{name}: a value in {side}, missing in {other_side}", f"value-{code}", tensor=name
            )


def holds_no_values(format_name: str) -> bool:
    """Return whether a format stores only tensors; other values are in a side file, if at all."""
    return not FORMATS[format_name].writing.has_values


def _has(catalog: Catalog, name: str) -> bool:
    return name in catalog.tensors or name in catalog.objects


def differing_type(one: TensorEntry, other: TensorEntry, options: CompareOptions) -> Problem | None:
    """Return how shapes or element types of two tensors differ, None if values can be compared.

    Scalars, such as a step counter, are never cast.
    """
    if one.shape != other.shape:
        message = f"{one.name}: shape A {list(one.shape)}, B {list(other.shape)}"
        return Problem(message, "shape-differs", tensor=one.name)
    types = one.dtype, other.dtype
    if types[0] == types[1]:
        return None
    if options.tolerance is not None and all(dtype.is_numeric for dtype in types):
        return None
    if options.cast and differ_in_type_alone(one, other):
        return None
    names = [short_name(dtype.name) for dtype in types]
    message = f"{one.name}: A {names[0]}, B {names[1]}"
    return Problem(message, "dtype-differs", tensor=one.name)


def differ_in_type_alone(one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two tensors are weights of one shape, which can be compared once cast."""
    is_weight = can_cast(one) and state_category(one) == "model"
    return one.shape == other.shape and is_weight and other.dtype.kind == "float"


def nothing_compared(one: Catalog, other: Catalog, *, has_matches: bool) -> Problem:
    """Return why no tensor was compared; with matches, some could be, but cannot be read."""
    common = one.tensors.keys() & other.tensors.keys()
    if has_matches or not common:
        cause = "none can be read" if has_matches else "no name is in both"
        return Problem(cause, NOTHING_COMPARED)
    text = f"{plural(len(common), 'name')} in both, of other shapes or types"
    only_types = any(differ_in_type_alone(one.tensors[n], other.tensors[n]) for n in common)
    hint = "--cast compares weights of other types" if only_types else "`ckptool diff` lists them"
    return Problem(text, NOTHING_COMPARED).with_hint(hint)


def differing_values(one: Catalog, other: Catalog) -> Iterator[Problem]:
    """Yield a problem for each common value that differs, or cannot be compared."""
    for name in common_values(one, other):
        value, other_value = one.objects[name].value, other.objects[name].value
        if isinstance(value, Repeated) or isinstance(other_value, Repeated):
            message = f"{name}: a value that contains itself; not compared"
            yield Problem(message, "value-not-compared", tensor=name)
        elif value_digest(value, name) != value_digest(other_value, name):
            yield Problem(f"{name}: {difference(value, other_value)}", "value-differs", tensor=name)


def differing_texts(
    one: Catalog, other: Catalog, is_dropped: Callable[[str], bool]
) -> Iterator[Problem]:
    """Yield a problem for each text in headers that differs, or that only one side has.

    If the first's format has no place for texts, those that only the other has are no difference.
    """
    sides = texts_of(one), texts_of(other)
    both_have = FORMATS[one.format].writing.has_metadata
    for key in sorted({*sides[0], *sides[1]} if both_have else sides[0]):
        values = [sorted(texts.get(key, ())) for texts in sides]
        if values[0] != values[1] and not is_dropped(key):
            shown = [" and ".join(map(short_text, texts)) or "nothing" for texts in values]
            yield Problem(f"metadata {key}: A {shown[0]}, B {shown[1]}", "metadata-differs")


def common_values(one: Catalog, other: Catalog) -> list[str]:
    """Return the names of the values that both sides have."""
    return [name for name in one.objects if name in other.objects]


def readable(
    opened: OpenedCheckpoint, catalog: Catalog, opens: Opens = Opens.AT_ONCE
) -> tuple[Catalog, dict[str, Problem]]:
    """Return the catalog's tensors with containers opened, and why some cannot be read, by name.

    ``catalog`` is that of ``opened``, rewritten or not. No tensor byte is read.
    """
    gaps = {entry.name: coverage_problem(entry) for entry in catalog.tensors.values()}
    problems = {name: gap for name, gap in gaps.items() if gap is not None}
    tiled = {name: entry for name, entry in catalog.tensors.items() if name not in problems}
    try:
        return opened.open_containers(catalog.with_tensors(tiled), opens), problems
    except (Unsupported, Damaged, Hostile):
        pass  # then each tensor by itself, to find those that cannot be opened
    tensors: dict[str, TensorEntry] = {}
    objects = catalog.objects
    for name, entry in tiled.items():
        try:
            located = opened.open_containers(catalog.with_tensors({name: entry}))
        except (Unsupported, Damaged, Hostile) as error:
            problems[name] = error.problems[0]
        else:
            tensors |= located.tensors
            objects |= located.objects
    return replace(catalog, tensors=tensors, objects=objects), problems


def stored_problems(
    reads: CheckedSource, entries: Iterable[TensorEntry], workers: int
) -> Iterator[Problem]:
    """Yield wrong checksums of the bytes read for tensors, and differing copies."""
    stored = [tensor for entry in entries for tensor in stored_tensors(entry)]
    try:
        yield from reads.problems(stored, workers)
        yield from differing_replicas(stored, reads.files, workers)
    except CkptoolError as error:
        yield from error.problems


def differing_companions(
    one: OpenedCheckpoint, other: OpenedCheckpoint, rewriting: RewriteOptions
) -> Iterator[Problem]:
    """Yield a problem for each file beside the first one's tensors that the other lacks or changed.

    These are config.json, tokenizer and similar files. The files of ``--hf-assets``, which
    ``convert`` copies, replace those of the same name. A config.json that differs only in element
    type is equal, and so is one that differs in a quantization that was removed, as nothing in B
    is quantized: tensors are compared separately. Raises NotFound if a file cannot be read,
    UsageError if there are no assets.
    """
    files, other_files = _companions(one), _companions(other)
    assets = rewriting.map.assets
    besides: tuple[str, ...] = DTYPE_KEYS
    if assets is not None:
        source, sizes = assets_in(assets, one.catalog)
        files |= {name: _Companion(source, name, size) for name, size in sizes.items()}
    if rewriting.dequantize or is_plain(other.catalog):
        besides += QUANTIZATION_KEYS
        files = {name: file for name, file in files.items() if name not in QUANTIZATION_FILES}
    for name, file in files.items():
        other_file = other_files.get(name)
        if other_file is None:
            yield Problem(f"{name}: a file in A, missing in B", "companion-missing", file=name)
        elif not file.equals(other_file, besides):
            yield Problem(f"{name}: {file.difference(other_file)}", "companion-differs", file=name)


class _Companion(Struct, frozen=True):
    source: Files
    file: str
    nbytes: int

    def equals(self, other: _Companion, besides: tuple[str, ...]) -> bool:
        """Return whether both are the same bytes, or equal configs ``besides`` some keys."""
        if self.nbytes == other.nbytes and self._digest() == other._digest():
            return True
        is_config = self.file.split("/")[-1] == CONFIG
        return is_config and self._config(besides) == other._config(besides) is not None

    def difference(self, other: _Companion) -> str:
        """Return how they differ: configs by what they state, others by their sizes."""
        sizes = f"content differs (A {self.nbytes:,} bytes, B {other.nbytes:,})"
        if not self.file.endswith(".json"):
            return sizes
        configs = self._config(()), other._config(())
        if None in configs or configs[0] == configs[1]:
            return sizes
        return difference(*(json.loads(config or "") for config in configs))

    def _digest(self) -> str:
        """Return the SHA-256 (hex) of the file."""
        return file_digests([self.file], self.source, 1)[self.file]

    def _config(self, besides: tuple[str, ...]) -> str | None:
        """Return a model's config without some keys, None if it is none."""
        try:
            config = object_in(self.source, self.file)
        except Damaged:
            return None
        inner = config.get("text_config")
        for part in (config, inner if isinstance(inner, dict) else {}):
            for key in besides:
                part.pop(key, None)
        return json.dumps(config, sort_keys=True)


def _companions(opened: OpenedCheckpoint) -> dict[str, _Companion]:
    """Return each file that goes with a model, by the name that ``convert`` gives it."""
    sizes = opened.catalog.companions
    return {
        path: _Companion(opened.source, name, sizes[name])
        for path, name in companion_targets(opened.catalog).items()
    }
