"""Key maps by name or file: found, chosen, turned the right way, and applied."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from ckptool.commands.keymap.hf_config import recorded_config
from ckptool.commands.keymap.model_record import Record, facts, records
from ckptool.commands.keymap.report import MapReport
from ckptool.commands.open import Opened, text_of
from ckptool.commands.options.source import MapOptions
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.apply import Mapped, apply_map, listed
from ckptool.core.keymap.match import Facts, Matcher, fits, framed, kinds_of
from ckptool.core.keymap.model import KeyMap, UnknownSizes
from ckptool.core.keymap.parse import parse_map
from ckptool.errors import UsageError

AUTO = "auto"
HUGGING_FACE = "Hugging Face"


@cache
def builtin_maps() -> dict[str, KeyMap]:
    """The maps that come with ckptool, by name."""
    found = {}
    for file in sorted(resources.files("ckptool").joinpath("maps").iterdir(), key=str):
        if file.name.endswith(".toml"):
            read = parse_map(tomllib.loads(file.read_text("utf-8")), file.name)
            found[read.name] = read
    return found


def map_text(name: str) -> str:
    """The TOML of a built-in map; UsageError where there is none of that name."""
    if name not in builtin_maps():
        raise UsageError(f"{name!r}: unknown map", hint=_nearest(name) or _known_maps())
    return resources.files("ckptool").joinpath("maps", f"{name}.toml").read_text("utf-8")


def load_map(name: str) -> KeyMap:
    """The built-in map of that name, or that of a TOML file; UsageError where it is neither."""
    path = Path(name)
    if name in builtin_maps() or (path.suffix != ".toml" and not path.is_file()):
        _require_known(name)
        return builtin_maps()[name]
    try:
        content = tomllib.loads(text_of(path, "--map"))
    except ValueError as error:
        raise UsageError(f"--map {name}: {error}") from None
    return parse_map(content, name)


def _require_known(name: str) -> None:
    if name not in builtin_maps():
        raise UsageError(
            f"--map {name!r}: not a built-in map or a file",
            hint=_nearest(name) or f"{AUTO}, {_known_maps()}, or a TOML file",
        )


def _known_maps() -> str:
    return f"one of {', '.join(builtin_maps())}"


def _nearest(name: str) -> str | None:
    import difflib

    close = difflib.get_close_matches(name, [AUTO, *builtin_maps()], n=1)
    return f"did you mean {close[0]}?" if close else None


def map_checkpoint(
    opened: Opened, catalog: Catalog, options: MapOptions
) -> tuple[Catalog, MapReport]:
    """The (located) catalog under the map that is asked for, and what was done.

    Raises UsageError or Unsupported as ``apply_map``, and where no map or several would do.
    """
    known = records(opened.source, opened.catalog, options.assets)
    chosen = (
        _detect_map(catalog, known, options)
        if options.name == AUTO
        else _requested_map(catalog, options)
    )
    key_map, reason = chosen
    types = _model_types(known)
    if types and not _is_for(key_map, types):
        reason += f", but the model_type in config.json is {', '.join(types)}"
    try:
        done = apply_map(catalog, key_map, facts(key_map, known, options.dims))
    except UnknownSizes as error:
        raise _unknown_sizes(error, key_map) from None
    config, lacks = (None, "")
    if key_map.target == HUGGING_FACE:
        config, lacks = recorded_config(known, done.catalog)
    report = MapReport(
        key_map.name,
        key_map.source,
        key_map.target,
        reason,
        done.moves,
        done.excluded,
        config,
        lacks,
    )
    return _noted(done, report), report


def _noted(done: Mapped, report: MapReport) -> Catalog:
    return replace(done.catalog, notes=(*done.catalog.notes, *report.notes))


def _unknown_sizes(error: UnknownSizes, key_map: KeyMap) -> UsageError:
    """The error that names the dims that can be looked up or given."""
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
    """The keys of config.json among what tells a dim's size: no expressions."""
    return [look for look in lookups if isinstance(look, str) and " " not in look]


# Which map, and which way


def _requested_map(catalog: Catalog, options: MapOptions) -> tuple[KeyMap, str]:
    forward = load_map(options.name or "")
    if options.inverse is not None:
        return (forward.inverse if options.inverse else forward), "as asked"
    taken = [_count_matches(catalog, one) for one in (forward, forward.inverse)]
    if taken[0] == taken[1] and taken[0]:
        raise UsageError(
            f"--map {options.name}: names match both sides of the map",
            hint="use --inverse to apply it from `to` to `from`, --no-inverse from `from` to `to`",
        )
    if taken[1] > taken[0]:
        return forward.inverse, "applied in reverse: the names match its `to` side"
    return forward, "as asked"


def _count_matches(catalog: Catalog, key_map: KeyMap) -> int:
    """How many of the model's tensors the map's rules take."""
    matcher = Matcher(key_map, Facts().of(catalog, key_map), "model")
    found, _ = framed(catalog, matcher.knows, matcher.knows)
    return sum(len(names) for frame, names in found.items() if frame.part == "model")


def _detect_map(catalog: Catalog, known: list[Record], options: MapOptions) -> tuple[KeyMap, str]:
    """The one built-in map that takes every tensor of the model."""
    kinds = kinds_of(catalog)
    candidates = [
        way
        for one in builtin_maps().values()
        for inverse, way in ((False, one), (True, one.inverse))
        if options.inverse in (None, inverse) and fits(catalog, kinds, way, facts(way, known, {}))
    ]
    if not candidates:
        raise _none_fits(catalog)
    types = _model_types(known)
    if types:
        _require_for(types, candidates)
        candidates = [one for one in candidates if _is_for(one, types)]
    if len(candidates) == 1:
        by = "names and config.json" if types else "names"
        return candidates[0], f"detected from {by}"
    raise UsageError(
        f"--map auto: {len(candidates)} maps match:\n"
        + listed([f"{one.name} ({one.source} to {one.target})" for one in candidates]),
        hint=f"choose one, for example --map {candidates[0].name}",
    )


def _model_types(known: Sequence[Record]) -> list[str]:
    """What config.json files say the model is, each once."""
    return list(dict.fromkeys(str(one["model_type"]) for one in known if one.get("model_type")))


def _is_for(key_map: KeyMap, types: Collection[str]) -> bool:
    return not key_map.model_types or not {*types}.isdisjoint(key_map.model_types)


def _require_for(types: Sequence[str], candidates: Sequence[KeyMap]) -> None:
    """UsageError where names fit, but config.json says that the model is another."""
    if any(_is_for(one, types) for one in candidates):
        return
    first = candidates[0]
    raise UsageError(
        f"--map auto: {first.name} matches all names, but is for"
        f" {', '.join(first.model_types)}, and the model_type in config.json is {', '.join(types)}",
        hint=f"use --map {first.name} to apply it anyway",
    )


def _none_fits(catalog: Catalog) -> UsageError:
    """The error that says which map comes nearest, and what it does not take."""
    ways = [way for one in builtin_maps().values() for way in (one, one.inverse)]
    nearest = max(ways, key=lambda way: _count_matches(catalog, way))
    if not _count_matches(catalog, nearest):
        return UsageError(
            "--map auto: no built-in map matches any model tensor",
            hint="`ckptool maps` lists maps; `ckptool maps NAME` prints one to start from",
        )
    matcher = Matcher(nearest, Facts().of(catalog, nearest), "model")
    _, odd = framed(catalog, matcher.knows, matcher.knows)
    return UsageError(
        f"--map auto: no built-in map matches all model tensors; {nearest.name}"
        f" ({nearest.source} to {nearest.target}) matches all but {len(odd):,}:\n" + listed(odd),
        hint="use --drop 'GLOB' to exclude tensors",
    )
