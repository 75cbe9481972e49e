"""Key maps: choose one, orient it, check it against what is recorded, and apply it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptool.commands.keymap.functions import differing_function, fused_otherwise
from ckptool.commands.keymap.hf_config import recorded_config
from ckptool.commands.keymap.library import AUTO, builtin_maps, load_map
from ckptool.commands.keymap.model_config import (
    count_problems,
    lacking_experts,
    uncounted_experts,
)
from ckptool.commands.keymap.records import (
    CONFIG,
    MODEL_TYPES,
    Record,
    records,
    records_around,
    records_model,
)
from ckptool.commands.keymap.sizes import facts, merge
from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.apply import Move, apply_map, list_lines
from ckptool.core.keymap.match import Frames, Matcher, ModelFacts, find_frames, fits, kinds_of
from ckptool.core.keymap.model import KeyMap, UnknownSizes
from ckptool.core.quantization.names import quantized_names
from ckptool.core.text import plural
from ckptool.errors import Unsupported, UsageError

EXPERTS = ("packed", "separate")
"""How a mixture of experts is stored: one tensor for all of them, or one per expert."""
_PACKED = "transformers 5 in memory"
"""The name that maps give the side whose experts are packed."""
HUGGING_FACE = "Hugging Face"
_OF_FILES = ("hf", "safetensors")
"""Formats of model files, in which some models' experts are packed, too (Qwen3.5)."""


@dataclass(frozen=True, slots=True)
class MapReport:
    """The applied map, the reason for it, and every tensor that it makes.

    ``config`` is the model's configuration as in config.json, None if the target is not Hugging
    Face's or the checkpoint does not record enough: ``config_lacks`` says what. ``warnings`` name a
    mismatch between the map and the model in config.json, and sizes that it does not state.
    """

    name: str
    source: str
    target: str
    reason: str
    moves: tuple[Move, ...]
    excluded: tuple[str, ...]
    computed: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    config_lacks: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the map for the user."""
        applied = f"map {self.name}, {self.source} to {self.target}: {self.reason}"
        left = (f"excluded by the map: {', '.join(self.excluded)}",) if self.excluded else ()
        made = plural(len(self.computed), "tensor")
        changed = f"computed, and rounded to their type, as the map says: {made}"
        return (
            applied,
            *self.warnings,
            *left,
            *([changed] if self.computed else []),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the map, and every tensor it makes."""
        return {
            "name": self.name,
            "from": self.source,
            "to": self.target,
            "reason": self.reason,
            "excluded": self.excluded,
            "tensors": [
                {
                    "from": move.sources,
                    "to": move.target,
                    "dtype": move.entry.dtype.name,
                    "shape": move.entry.shape,
                    "operation": move.operation,
                }
                for move in self.moves
            ],
        }

    @property
    def decided(self) -> object:
        """The map's decisions on the output, beyond names and places."""
        return [
            (move.sources, move.target, move.entry.shape, move.operation) for move in self.moves
        ]


def map_checkpoint(
    opened: OpenedCheckpoint, catalog: Catalog, options: MapOptions, *, whole: bool = True
) -> tuple[Catalog, MapReport]:
    """Return the (located) catalog under the requested map, and the map's report.

    ``whole`` means that the catalog should contain the entire model. Raises UsageError or
    Unsupported as ``apply_map`` does, and if no map or several match.
    """
    inside = records(opened.source, opened.catalog, options.assets)
    if records_model(inside):
        with suppress(_MissingSizes):
            return _map_by(opened, catalog, options, inside, {}, whole=whole)
    around = records_around(opened.path, opened.catalog)
    return _map_by(opened, catalog, options, inside, around, whole=whole)


class _MissingSizes(UsageError):
    """Sizes that a map needs are neither given nor recorded."""


def _map_by(
    opened: OpenedCheckpoint,
    catalog: Catalog,
    options: MapOptions,
    inside: Sequence[Record],
    around: Mapping[str, Record],
    *,
    whole: bool,
) -> tuple[Catalog, MapReport]:
    """Map a catalog by what is recorded in a checkpoint, and around it by file."""
    known = [*inside, *around.values()]
    if options.experts is not None:
        key_map, reason = _map_of_experts(catalog, known, options)
    elif options.name == AUTO:
        key_map, reason = _detect_map(catalog, known, options)
    else:
        key_map, reason = requested_map(catalog, options)
    types = _model_types(known)
    if grouped := fused_otherwise(key_map.rules, types):
        raise Unsupported(
            f"map {key_map.name}: {grouped!r} stores rows by group, but {types[0]} stores them"
            " in consecutive blocks",
            hint="blocks are written [(head dim | kv dim | kv dim) hidden]",
        )
    recorded = merge(known)
    differs = "" if not types or _is_for(key_map, types) else _other_model(key_map, recorded, types)
    facts_known = facts(key_map, known, options.dims)
    if facts_known != facts(key_map, inside, options.dims):
        reason += f", with sizes from {', '.join(around)}"
    try:
        mapped = apply_map(catalog, key_map, facts_known)
    except UnknownSizes as error:
        raise _unknown_sizes(error, key_map) from None
    counted = _compare_counts(key_map, catalog, mapped.catalog, recorded, whole=whole)
    config, lacks = (None, "")
    if key_map.target == HUGGING_FACE:
        config, lacks = recorded_config(inside, mapped.catalog)
        folders = [place.removesuffix(f"/{CONFIG}") for place in around if place.endswith(CONFIG)]
        if config is None and folders and options.assets is None:
            lacks += f" ({folders[0]} has one)"
    report = MapReport(
        key_map.name,
        key_map.source,
        key_map.target,
        reason,
        mapped.moves,
        mapped.excluded,
        mapped.computed,
        tuple(filter(None, [differs, *counted])),
        config,
        lacks,
    )
    return replace(mapped.catalog, notes=(*mapped.catalog.notes, *report.notes)), report


def _other_model(key_map: KeyMap, recorded: Record, types: Sequence[str]) -> str:
    """Return the warning about a map that is applied to a model that it is not for.

    Raises Unsupported if that model is known to compute something else.
    """
    is_for = f"{key_map.name} is for {', '.join(key_map.model_types)}"
    is_of = f"the model_type in config.json is {', '.join(types)}"
    differs = "" if key_map.source == _PACKED else differing_function(recorded, types)
    if differs:
        raise Unsupported(
            f"map {is_for}, and {is_of}, which computes something else although its names match:"
            f" {differs}",
            hint=f"a map file with include = ['{key_map.name}'] and model_types = {list(types)}"
            " states that the target computes it, too",
        )
    return f"{is_for}, but {is_of}: matching names do not mean that both compute the same"


def _compare_counts(
    key_map: KeyMap, source: Catalog, target: Catalog, recorded: Record, *, whole: bool
) -> list[str]:
    """Check a model's layers, experts and heads against what is recorded; return the warnings.

    Uses the names of the Hugging Face side. Raises Unsupported if the counts differ.
    """
    way, catalog = key_map, source
    if key_map.target == HUGGING_FACE or key_map.source not in (HUGGING_FACE, _PACKED):
        way, catalog = key_map.inverse, target
    if way.source not in (HUGGING_FACE, _PACKED):
        return []
    problems: list[str] = []
    lacking: list[str] = []
    counted: set[int] = set()
    for frame, names in _match(catalog, way)[0].items():
        if frame.part == "model":
            tensors = {inner: catalog.tensors[name] for inner, name in names.items()}
            model = catalog.with_tensors(tensors)
            problems += count_problems(recorded, model)
            lacking += lacking_experts(recorded, model)
            counted |= uncounted_experts(recorded, model)
    if lacking and not problems and whole:
        raise Unsupported(
            "experts of the model are missing:\n" + list_lines(lacking),
            hint="use --select or --drop to convert part of a model",
        )
    if problems and whole:
        raise Unsupported(
            "the tensors do not match the recorded model:\n" + list_lines(problems),
            hint="pass this model's config.json with --hf-assets FOLDER, or convert part of a model"
            " with --select or --drop",
        )
    numbers = " or ".join(f"{number:,}" for number in sorted(counted))
    by_name = f"{numbers} experts per layer, counted from the names: no config records how many"
    return [*problems, *lacking, *([by_name] if counted else [])]


def _unknown_sizes(error: UnknownSizes, key_map: KeyMap) -> _MissingSizes:
    """Return the error that names the dims to look up or to give."""
    keys = {n: _keys(key_map.sizes.get(n, ())) for n in error.names}
    names = [name for name in error.names if keys[name]] or list(error.names)
    written = ", ".join(keys[name][0] for name in names if keys[name])
    given = " ".join(f"--dim {name}=N" for name in names)
    return _MissingSizes(
        f"map {key_map.name}: size of {', '.join(names)} not found in config",
        hint=f"pass {given}, or --hf-assets FOLDER with a config.json that has {written}"
        if written
        else given,
    )


def _keys(lookups: Sequence[str | int]) -> list[str]:
    """Return the keys of config.json among a dim's lookups, without expressions."""
    return [look for look in lookups if isinstance(look, str) and " " not in look]


def requested_map(catalog: Catalog, options: MapOptions) -> tuple[KeyMap, str]:
    """Return the map of ``--map``, oriented as requested or as most names match, and the reason."""
    forward = load_map(options.name or "")
    if options.inverse is not None:
        return (forward.inverse if options.inverse else forward), "as asked"
    matches, inverse_matches = (
        (_count_matches(catalog, replace(way, keep=())), _count_matches(catalog, way))
        for way in (forward, forward.inverse)
    )
    if matches == inverse_matches and any(matches):
        raise UsageError(
            f"--map {options.name}: names match both sides of the map",
            hint="use --inverse to apply it from `to` to `from`, --no-inverse from `from` to `to`",
        )
    if inverse_matches > matches:
        return forward.inverse, "applied in reverse: the names match its `to` side"
    return forward, "as asked"


def _count_matches(catalog: Catalog, key_map: KeyMap) -> int:
    """Count the model's tensors that the map's rules match."""
    frames, _ = _match(catalog, key_map)
    return sum(len(names) for frame, names in frames.items() if frame.part == "model")


def _match(catalog: Catalog, key_map: KeyMap) -> tuple[Frames, list[str]]:
    """Return the names that the map's rules match, by frame, and the model's unmatched ones."""
    matcher = Matcher(key_map, ModelFacts().of(catalog, key_map), "model")
    return find_frames(catalog, matcher.knows, matcher.knows)


def _detect_map(catalog: Catalog, known: list[Record], options: MapOptions) -> tuple[KeyMap, str]:
    """Return the only built-in map that matches every tensor of the model, and the reason."""
    ways = [
        way
        for key_map in builtin_maps().values()
        for inverse, way in ((False, key_map), (True, key_map.inverse))
        if options.inverse in (None, inverse) and way.detected
    ]
    candidates = _fitting(catalog, known, ways)
    if not candidates:
        raise _none_fits(catalog, builtin_maps().values(), f"--map {AUTO}")
    types = _model_types(known)
    in_memory = [w for w in candidates if w.source == _PACKED and (not types or _is_for(w, types))]
    if in_memory and catalog.format not in _OF_FILES:
        candidates = in_memory
    return _only_one(candidates, known, f"--map {AUTO}")


def _map_of_experts(
    catalog: Catalog, known: list[Record], options: MapOptions
) -> tuple[KeyMap, str]:
    """Return the only built-in map that packs or separates a model's experts, as requested.

    Raises UsageError if they are that way already, or no map matches every tensor of the model.
    """
    asked = f"--experts {options.experts}"
    if options.experts not in EXPERTS:
        raise UsageError(f"{asked}: not {' or '.join(EXPERTS)}")
    if options.name is not None:
        raise UsageError(f"--map and {asked} cannot be combined", hint="use one after the other")
    forward = [key_map for key_map in builtin_maps().values() if key_map.source == _PACKED]
    ways = [(key_map, key_map.inverse) for key_map in forward]
    wanted = options.experts == EXPERTS[1]
    candidates = _fitting(catalog, known, [there if wanted else back for there, back in ways])
    if candidates:
        return _only_one(candidates, known, asked)
    if _fitting(catalog, known, [back if wanted else there for there, back in ways]):
        raise UsageError(f"{asked}: the experts are already {options.experts}")
    raise _none_fits(catalog, forward, asked)


def _fitting(catalog: Catalog, known: list[Record], ways: Sequence[KeyMap]) -> list[KeyMap]:
    """Return the maps that match every tensor of the model."""
    kinds, types = kinds_of(catalog), _model_types(known)
    return [
        way
        for way in ways
        if (not way.needs_model_type or (types and _is_for(way, types)))
        and fits(catalog, kinds, way, facts(way, known, {}))
    ]


def _only_one(candidates: list[KeyMap], known: list[Record], asked: str) -> tuple[KeyMap, str]:
    """Return the only one of the maps that is for the model, and the reason."""
    types = _model_types(known)
    if types:
        _require_for(types, candidates, asked)
        candidates = [key_map for key_map in candidates if _is_for(key_map, types)]
    if len(candidates) == 1:
        by = "names and config.json" if types else "names"
        return candidates[0], f"detected from {by}"
    matches = [f"{way.name} ({way.source} to {way.target})" for way in candidates]
    raise UsageError(
        f"{asked}: {len(candidates)} maps match:\n" + list_lines(matches),
        hint=f"choose one, for example --map {candidates[0].name}",
    )


def _model_types(known: Sequence[Record]) -> list[str]:
    """Return the ``model_type`` of the strongest record that has one, such as --hf-assets.

    With that of the language model in it, if there is one.
    """
    kinds = (record.get(MODEL_TYPES) or [record.get("model_type")] for record in known)
    return next((list(map(str, each)) for each in kinds if any(each)), [])


def _is_for(key_map: KeyMap, types: Collection[str]) -> bool:
    return not key_map.model_types or not {*types}.isdisjoint(key_map.model_types)


def _require_for(types: Sequence[str], candidates: Sequence[KeyMap], asked: str) -> None:
    """Raise UsageError if names match, but config.json names another model."""
    if any(_is_for(key_map, types) for key_map in candidates):
        return
    first = candidates[0]
    raise UsageError(
        f"{asked}: {first.name} matches all names, but is for"
        f" {', '.join(first.model_types)}, and the model_type in config.json is {', '.join(types)}",
        hint=f"use --map {first.name} to apply it anyway",
    )


def _none_fits(catalog: Catalog, maps: Iterable[KeyMap], asked: str) -> UsageError:
    """Return the error that names the nearest map, and what it does not match."""
    ways = [way for key_map in maps for way in (key_map, key_map.inverse)]
    nearest = max(ways, key=lambda way: _count_matches(catalog, way))
    if not _count_matches(catalog, nearest):
        return UsageError(
            f"{asked}: no built-in map matches any model tensor",
            hint="`ckptool maps` lists maps; `ckptool maps NAME` prints one to start from",
        )
    _, unmatched = _match(catalog, nearest)
    return UsageError(
        f"{asked}: no built-in map matches all model tensors; {nearest.name}"
        f" ({nearest.source} to {nearest.target}) matches all but {len(unmatched):,}:\n"
        + list_lines(unmatched),
        hint="use --drop 'GLOB' to exclude tensors"
        if quantized_names(catalog).isdisjoint(unmatched)
        else "use --dequantize: key maps do not apply to quantized tensors",
    )
