"""Which key map is applied, and which way: as asked, or as names and config.json tell."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from ckptool.commands.keymap.library import AUTO, EXPERTS, builtin_maps, load_map
from ckptool.commands.keymap.sizes import facts
from ckptool.commands.model.records import MODEL_TYPES, Record
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.match import (
    Frames,
    Matcher,
    ModelFacts,
    find_frames,
    fits,
    inner_kinds,
    kinds_of,
    may_match,
)
from ckptool.core.keymap.model import KeyMap
from ckptool.core.quantization.names import dequantizing_hint
from ckptool.core.text import list_lines, list_some
from ckptool.errors import UsageError

HUGGING_FACE = "Hugging Face"
PACKED = "transformers 5 in memory"
"""The names that maps give the side of files, and the side whose experts are packed."""
OF_FILES = ("hf", "safetensors")
"""Formats of model files, in which some models' experts are packed, too (Qwen3.5)."""


def choose_map(catalog: Catalog, records: list[Record], options: MapOptions) -> tuple[KeyMap, str]:
    """Return the map to apply, turned the right way, and the reason.

    Raises UsageError where no map would do, or several.
    """
    if options.experts is not None:
        return _map_of_experts(catalog, records, options)
    if options.name == AUTO:
        return _detect_map(catalog, records, options)
    return requested_map(catalog, options)


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
    if not may_match(inner_kinds(catalog), key_map):
        return 0
    frames, _ = match_names(catalog, key_map)
    return sum(len(names) for frame, names in frames.items() if frame.part == "model")


def match_names(catalog: Catalog, key_map: KeyMap) -> tuple[Frames, list[str]]:
    """Return the names that the map's rules match, by frame, and the model's unmatched ones."""
    matcher = Matcher(key_map, ModelFacts().of(catalog, key_map), "model")
    return find_frames(catalog, matcher.knows, matcher.knows)


def _detect_map(catalog: Catalog, records: list[Record], options: MapOptions) -> tuple[KeyMap, str]:
    """Return the only built-in map that matches every tensor of the model, and the reason."""
    ways = [
        way
        for key_map in builtin_maps().values()
        for inverse, way in ((False, key_map), (True, key_map.inverse))
        if options.inverse in (None, inverse) and way.detected
    ]
    candidates = _fitting(catalog, records, ways)
    if not candidates:
        raise _none_fits(catalog, records, ways, f"--map {AUTO}")
    types = model_types(records)
    in_memory = [w for w in candidates if w.source == PACKED and (not types or is_for(w, types))]
    if in_memory and catalog.format not in OF_FILES:
        candidates = in_memory
    return _only_one(candidates, records, f"--map {AUTO}")


def _map_of_experts(
    catalog: Catalog, records: list[Record], options: MapOptions
) -> tuple[KeyMap, str]:
    """Return the only built-in map that packs or separates a model's experts, as requested.

    Raises UsageError if they are that way already, or no map matches every tensor of the model.
    """
    flag = f"--experts {options.experts}"
    if options.experts not in EXPERTS:
        raise UsageError(f"{flag}: not {' or '.join(EXPERTS)}")
    if options.name is not None:
        raise UsageError(f"--map and {flag} cannot be combined", hint="use one after the other")
    if not any("experts." in name for name in catalog.tensors):
        raise UsageError(
            f"{flag}: no tensor of the model has `experts.` in its name",
            hint=f"leave {flag} out if the model has no experts",
        )
    maps = [key_map for key_map in builtin_maps().values() if key_map.source == PACKED]
    ways, reverse_ways = maps, [key_map.inverse for key_map in maps]
    if options.experts == EXPERTS[0]:
        ways, reverse_ways = reverse_ways, ways
    if candidates := _fitting(catalog, records, ways):
        return _only_one(candidates, records, flag)
    if _fitting(catalog, records, reverse_ways):
        raise UsageError(f"{flag}: the experts are already {options.experts}")
    raise _none_fits(catalog, records, [*ways, *reverse_ways], flag)


def _fitting(catalog: Catalog, records: list[Record], ways: Sequence[KeyMap]) -> list[KeyMap]:
    """Return the maps that match every tensor of the model."""
    kinds, types = kinds_of(catalog), model_types(records)
    return [
        way
        for way in ways
        if (not way.needs_model_type or (types and is_for(way, types)))
        and fits(catalog, kinds, way, facts(way, records, {}))
    ]


def _only_one(candidates: list[KeyMap], records: list[Record], flag: str) -> tuple[KeyMap, str]:
    """Return the only one of the maps that is for the model, and the reason."""
    types = model_types(records)
    if types:
        _require_for(types, candidates, flag)
        candidates = [key_map for key_map in candidates if is_for(key_map, types)]
    if len(candidates) == 1:
        by = "names and config.json" if types else "names"
        return candidates[0], f"detected from {by}"
    matches = [f"{way.name} ({way.source} to {way.target})" for way in candidates]
    hint = f"choose one, for example --map {candidates[0].name}"
    if all(way.source == HUGGING_FACE for way in candidates):
        hint += f"; the names are {HUGGING_FACE}'s, whose folders need none"
    elif not types:
        hint += ", or use --hf-assets FOLDER with the model's config.json"
    raise UsageError(f"{flag}: {len(candidates)} maps match:\n" + list_lines(matches), hint=hint)


def maps_between(catalog: Catalog, other: Catalog, records: list[Record]) -> list[str]:
    """Return the built-in maps that match every tensor of a model and give names of the other.

    Those for the model that its ``records`` name come first, then those that give most.
    """
    kinds = inner_kinds(other)
    ways = [way for key_map in builtin_maps().values() for way in (key_map, key_map.inverse)]
    ways = [way for way in ways if may_match(kinds, way.inverse)]
    types = model_types(records)
    matches = {
        way.name: (not types or is_for(way, types), _count_matches(other, way.inverse))
        for way in _fitting(catalog, records, ways)
    }
    return sorted((n for n, (_, count) in matches.items() if count), key=matches.__getitem__)[::-1]


def model_types(records: Sequence[Record]) -> list[str]:
    """Return the ``model_type`` of the strongest record that has one, such as --hf-assets.

    With that of the language model in it, if there is one.
    """
    pairs = ((record.get(MODEL_TYPES), record.get("model_type")) for record in records)
    kinds = (types if types and isinstance(types, list) else [kind] for types, kind in pairs)
    return next((list(map(str, types)) for types in kinds if any(types)), [])


def is_for(key_map: KeyMap, types: Collection[str]) -> bool:
    """Return whether a map is for a model of one of these types, or for any."""
    return not key_map.model_types or not {*types}.isdisjoint(key_map.model_types)


def _require_for(types: Sequence[str], candidates: Sequence[KeyMap], flag: str) -> None:
    """Raise UsageError if names match, but config.json names another model."""
    if not any(is_for(key_map, types) for key_map in candidates):
        raise _of_another(types, candidates[0], flag)


def _of_another(types: Sequence[str], key_map: KeyMap, flag: str) -> UsageError:
    """Return the error that a map's names match, but config.json names another model."""
    return UsageError(
        f"{flag}: {key_map.name} matches all names, but is for"
        f" {list_some(key_map.model_types, 3)}, and the model_type in config.json is"
        f" {', '.join(types)}",
        hint=f"use --map {key_map.name} to apply it anyway",
    )


def _none_fits(
    catalog: Catalog, records: list[Record], ways: Sequence[KeyMap], flag: str
) -> UsageError:
    """Return the error that names the nearest map, and what it does not match."""
    best = max(ways, key=lambda way: _count_matches(catalog, way))
    if not _count_matches(catalog, best):
        return UsageError(
            f"{flag}: no built-in map matches any model tensor",
            hint="`ckptool maps` lists maps; `ckptool maps NAME` prints one to start from",
        )
    _, unmatched = match_names(catalog, best)
    types = model_types(records)
    if not unmatched and best.model_types:
        if types and not is_for(best, types):
            return _of_another(types, best, flag)
        return UsageError(
            f"{flag}: {best.name} matches all names, but no config.json says that the model is"
            f" {' or '.join(best.model_types)}",
            hint=f"use --hf-assets FOLDER with its config.json, or --map {best.name}",
        )
    return UsageError(
        f"{flag}: no built-in map matches all model tensors; {best.name}"
        f" ({best.source} to {best.target}) matches all but {len(unmatched):,}:\n"
        + list_lines(unmatched),
        hint=dequantizing_hint(catalog, unmatched) or "use --drop 'NAME' to exclude tensors",
    )
