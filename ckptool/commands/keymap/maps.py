"""Key maps by name or file: found, chosen, turned the right way, and applied."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ckptool.commands.keymap.hf_config import recorded_config
from ckptool.commands.keymap.records import CONFIG, Record, records, records_around
from ckptool.commands.open import OpenedCheckpoint, text_of
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.apply import Move, apply_map, list_lines
from ckptool.core.keymap.match import Frames, Matcher, ModelFacts, find_frames, fits, kinds_of
from ckptool.core.keymap.model import KeyMap, UnknownSizes
from ckptool.core.keymap.parse import parse_map
from ckptool.core.text import did_you_mean, one_of, plural
from ckptool.errors import UsageError

AUTO = "auto"
HUGGING_FACE = "Hugging Face"


@dataclass(frozen=True, slots=True)
class MapReport:
    """The map that was applied, why this one, and every tensor that it makes.

    ``config`` is the model's configuration as config.json has it, None where the target is not
    Hugging Face's or the checkpoint does not record enough: ``config_lacks`` says what. ``differs``
    says where config.json names a model that the map is not for.
    """

    name: str
    source: str
    target: str
    reason: str
    moves: tuple[Move, ...]
    excluded: tuple[str, ...]
    computed: tuple[str, ...]
    differs: str = ""
    config: dict[str, Any] | None = None
    config_lacks: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of it."""
        applied = f"map {self.name}, {self.source} to {self.target}: {self.reason}"
        left = (f"excluded by the map: {', '.join(self.excluded)}",) if self.excluded else ()
        made = plural(len(self.computed), "tensor")
        changed = f"computed, and rounded to their type, as the map says: {made}"
        return (
            *filter(None, [applied, self.differs]),
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
        """What the map decides of the output, beyond names and places."""
        return [
            (move.sources, move.target, move.entry.shape, move.operation) for move in self.moves
        ]


@cache
def builtin_maps() -> dict[str, KeyMap]:
    """Return the maps that come with ckptool, by name."""
    files = resources.files("ckptool").joinpath("maps").iterdir()
    names = sorted(file.name for file in files if file.name.endswith(".toml"))
    return {name: _builtin_map(name) for name in (n.removesuffix(".toml") for n in names)}


@cache
def _builtin_map(name: str) -> KeyMap:
    text = resources.files("ckptool").joinpath("maps", f"{name}.toml").read_text("utf-8")
    return parse_map(tomllib.loads(text), f"{name}.toml", _builtin_map)


def map_text(name: str) -> str:
    """Return the TOML of a built-in map; UsageError where there is none of that name."""
    if name not in builtin_maps():
        raise UsageError(f"{name!r}: unknown map", hint=one_of(name, builtin_maps()))
    return resources.files("ckptool").joinpath("maps", f"{name}.toml").read_text("utf-8")


def load_map(name: str) -> KeyMap:
    """Return the built-in map of a name, or that of a TOML file; UsageError where it is neither."""
    path = Path(name)
    if name in builtin_maps():
        return builtin_maps()[name]
    if path.suffix != ".toml" and not path.is_file():
        raise UsageError(
            f"--map {name!r}: not a built-in map or a file",
            hint=did_you_mean(
                name,
                [AUTO, *builtin_maps()],
                f"{AUTO}, one of {', '.join(builtin_maps())}, or a TOML file",
            ),
        )
    return _map_in(path, name, ())


def _map_in(path: Path, shown: str, seen: tuple[Path, ...]) -> KeyMap:
    """Parse a TOML file, and the maps that it includes: built-in ones, or files beside it.

    Raises UsageError.
    """
    if path in seen:
        raise UsageError(f"--map {shown}: includes itself")
    try:
        content = tomllib.loads(text_of(path, "--map"))
    except ValueError as error:
        raise UsageError(f"--map {shown}: {error}") from None

    def included(other: str) -> KeyMap:
        if other in builtin_maps():
            return builtin_maps()[other]
        beside = path.parent / other
        if not beside.is_file():
            raise UsageError(
                f"--map {shown}: includes {other!r}, not a built-in map or a file beside it",
                hint=did_you_mean(other, list(builtin_maps()), "`ckptool maps` lists maps"),
            )
        return _map_in(beside, str(beside), (*seen, path))

    return parse_map(content, shown, included)


def map_checkpoint(
    opened: OpenedCheckpoint, catalog: Catalog, options: MapOptions
) -> tuple[Catalog, MapReport]:
    """Return the (located) catalog under the map that is asked for, and what was done.

    Raises UsageError or Unsupported as ``apply_map``, and where no map or several would do.
    """
    inside = records(opened.source, opened.catalog, options.assets)
    around = records_around(opened.path, opened.catalog)
    known = [*inside, *around.values()]
    key_map, reason = (
        _detect_map(catalog, known, options)
        if options.name == AUTO
        else requested_map(catalog, options)
    )
    types = _model_types(known)
    differs = (
        f"{key_map.name} is for {', '.join(key_map.model_types)}, but the model_type in config.json"
        f" is {', '.join(types)}: names that fit do not say that both compute the same"
        if types and not _is_for(key_map, types)
        else ""
    )
    facts_known = facts(key_map, known, options.dims)
    if facts_known != facts(key_map, inside, options.dims):
        reason += f", with sizes from {', '.join(around)}"
    try:
        mapped = apply_map(catalog, key_map, facts_known)
    except UnknownSizes as error:
        raise _unknown_sizes(error, key_map) from None
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
        differs,
        config,
        lacks,
    )
    return replace(mapped.catalog, notes=(*mapped.catalog.notes, *report.notes)), report


def _unknown_sizes(error: UnknownSizes, key_map: KeyMap) -> UsageError:
    """Return the error that names the dims that can be looked up or given."""
    keys = {n: _keys(key_map.sizes.get(n, ())) for n in error.names}
    names = [name for name in error.names if keys[name]] or list(error.names)
    written = ", ".join(keys[name][0] for name in names if keys[name])
    given = " ".join(f"--dim {name}=N" for name in names)
    return UsageError(
        f"map {key_map.name}: size of {', '.join(names)} not found in config",
        hint=f"pass {given}, or --hf-assets FOLDER with a config.json that has {written}"
        if written
        else given,
    )


def _keys(lookups: Sequence[str | int]) -> list[str]:
    """Return the keys of config.json among a dim's lookups, without expressions."""
    return [look for look in lookups if isinstance(look, str) and " " not in look]


def facts(key_map: KeyMap, records: Sequence[Record], given: Mapping[str, int]) -> ModelFacts:
    """Return the sizes of a map's axes, as given or as recorded, and all facts that hold."""
    merged: dict[str, Any] = {}
    for record in reversed(records):
        merged |= {name: value for name, value in record.items() if value is not None}
    unknown = given.keys() - key_map.axes
    if unknown:
        named = key_map.sizes or sorted(key_map.axes)
        raise UsageError(
            f"--dim {min(unknown)}: unknown dim of map {key_map.name}",
            hint="known dims: " + ", ".join(named) if named else None,
        )
    sizes = {**given}
    for name in key_map.sizes:
        size = sizes[name] if name in sizes else _look_up(name, key_map, merged, sizes, ())
        if size is not None:
            sizes[name] = size
    return ModelFacts(sizes, frozenset(n for n, value in merged.items() if value is True))


def _look_up(
    name: str, key_map: KeyMap, merged: Record, sizes: Mapping[str, int], seen: tuple[str, ...]
) -> int | None:
    """Return the first size that a dim's keys and expressions (``a / b``, ``a * b``) give.

    An expression gives none where a size of it is unknown, or does not divide.
    A dim that is as large as another by default is so only where that one is recorded: a size that
    was given says nothing of the other.
    """
    for lookup in key_map.sizes[name]:
        if isinstance(lookup, int):
            return lookup
        words = lookup.split()
        known = sizes if len(words) > 1 else {}
        value, *others = (
            _value(word, key_map, merged, known, (*seen, name)) for word in words[::2]
        )
        for sign, other in zip(words[1::2], others, strict=False):
            if value is None or not other or (sign == "/" and value % other):
                value = None
                break
            value = value // other if sign == "/" else value * other
        if value is not None:
            return value
    return None


def _value(
    word: str, key_map: KeyMap, merged: Record, sizes: Mapping[str, int], seen: tuple[str, ...]
) -> int | None:
    """Return a record's number, or the size of another dim."""
    if word in sizes:
        return sizes[word]
    number = merged.get(word)
    if type(number) is int and number > 0:
        return number
    if word in key_map.sizes and word not in seen:
        return _look_up(word, key_map, merged, sizes, seen)
    return None


def requested_map(catalog: Catalog, options: MapOptions) -> tuple[KeyMap, str]:
    """Return the map of ``--map``, turned as asked or as most names match, and the reason."""
    forward = load_map(options.name or "")
    if options.inverse is not None:
        return (forward.inverse if options.inverse else forward), "as asked"
    matches, inverse_matches = (_count_matches(catalog, way) for way in (forward, forward.inverse))
    if matches == inverse_matches and matches:
        raise UsageError(
            f"--map {options.name}: names match both sides of the map",
            hint="use --inverse to apply it from `to` to `from`, --no-inverse from `from` to `to`",
        )
    if inverse_matches > matches:
        return forward.inverse, "applied in reverse: the names match its `to` side"
    return forward, "as asked"


def _count_matches(catalog: Catalog, key_map: KeyMap) -> int:
    """Count the model's tensors that the map's rules take."""
    frames, _ = _match(catalog, key_map)
    return sum(len(names) for frame, names in frames.items() if frame.part == "model")


def _match(catalog: Catalog, key_map: KeyMap) -> tuple[Frames, list[str]]:
    """Return the names that the map's rules take, by frame, and the model's that none takes."""
    matcher = Matcher(key_map, ModelFacts().of(catalog, key_map), "model")
    return find_frames(catalog, matcher.knows, matcher.knows)


def _detect_map(catalog: Catalog, known: list[Record], options: MapOptions) -> tuple[KeyMap, str]:
    """Return the one built-in map that takes every tensor of the model, and the reason."""
    kinds, types = kinds_of(catalog), _model_types(known)
    candidates = [
        way
        for key_map in builtin_maps().values()
        for inverse, way in ((False, key_map), (True, key_map.inverse))
        if options.inverse in (None, inverse)
        and way.detected
        and (not way.needs_model_type or (types and _is_for(way, types)))
        and fits(catalog, kinds, way, facts(way, known, {}))
    ]
    if not candidates:
        raise _none_fits(catalog)
    if types:
        _require_for(types, candidates)
        candidates = [key_map for key_map in candidates if _is_for(key_map, types)]
    if len(candidates) == 1:
        by = "names and config.json" if types else "names"
        return candidates[0], f"detected from {by}"
    matches = [f"{way.name} ({way.source} to {way.target})" for way in candidates]
    raise UsageError(
        f"--map auto: {len(candidates)} maps match:\n" + list_lines(matches),
        hint=f"choose one, for example --map {candidates[0].name}",
    )


def _model_types(known: Sequence[Record]) -> list[str]:
    """Return the ``model_type`` of each config.json, each once."""
    types = [str(record["model_type"]) for record in known if record.get("model_type")]
    return list(dict.fromkeys(types))


def _is_for(key_map: KeyMap, types: Collection[str]) -> bool:
    return not key_map.model_types or not {*types}.isdisjoint(key_map.model_types)


def _require_for(types: Sequence[str], candidates: Sequence[KeyMap]) -> None:
    """Raise UsageError where names fit, but config.json says that the model is another."""
    if any(_is_for(key_map, types) for key_map in candidates):
        return
    first = candidates[0]
    raise UsageError(
        f"--map auto: {first.name} matches all names, but is for"
        f" {', '.join(first.model_types)}, and the model_type in config.json is {', '.join(types)}",
        hint=f"use --map {first.name} to apply it anyway",
    )


def _none_fits(catalog: Catalog) -> UsageError:
    """Return the error that says which map comes nearest, and what it does not take."""
    maps = builtin_maps().values()
    ways = [way for key_map in maps for way in (key_map, key_map.inverse)]
    nearest = max(ways, key=lambda way: _count_matches(catalog, way))
    if not _count_matches(catalog, nearest):
        return UsageError(
            "--map auto: no built-in map matches any model tensor",
            hint="`ckptool maps` lists maps; `ckptool maps NAME` prints one to start from",
        )
    _, unmatched = _match(catalog, nearest)
    return UsageError(
        f"--map auto: no built-in map matches all model tensors; {nearest.name}"
        f" ({nearest.source} to {nearest.target}) matches all but {len(unmatched):,}:\n"
        + list_lines(unmatched),
        hint="use --drop 'GLOB' to exclude tensors",
    )
