"""Key maps: check them against what is recorded of the model, and apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.keymap.choice import (
    HUGGING_FACE,
    PACKED,
    choose_map,
    is_for,
    match_names,
    model_types,
)
from ckptool.commands.keymap.sizes import facts, merge
from ckptool.commands.model.config import (
    count_problems,
    lacking_experts,
    uncounted_experts,
)
from ckptool.commands.model.functions import differing_function, fused_otherwise
from ckptool.commands.model.hf_config import recorded_config
from ckptool.commands.model.records import (
    CONFIG,
    Record,
    records,
    records_around,
    records_model,
)
from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.apply import Move, apply_map
from ckptool.core.keymap.model import KeyMap
from ckptool.core.keymap.sizes import UnknownSizes
from ckptool.core.text import list_lines, list_some, plural
from ckptool.errors import Unsupported, UsageError


class MapReport(Struct, frozen=True):
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
        count = plural(len(self.computed), "tensor")
        changed = f"computed, and rounded to their type, as the map says: {count}"
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
            return _map_by(catalog, options, inside, {}, whole=whole)
    around = records_around(opened.path, opened.catalog)
    return _map_by(catalog, options, inside, around, whole=whole)


class _MissingSizes(UsageError):
    """Sizes that a map needs are neither given nor recorded."""


def _map_by(
    catalog: Catalog,
    options: MapOptions,
    inside: Sequence[Record],
    around: Mapping[str, Record],
    *,
    whole: bool,
) -> tuple[Catalog, MapReport]:
    """Map a catalog by what is recorded in a checkpoint, and around it by file."""
    records = [*inside, *around.values()]
    key_map, reason = choose_map(catalog, records, options)
    types = model_types(records)
    if tensor := fused_otherwise(key_map.rules, types):
        raise Unsupported(
            f"map {key_map.name}: {tensor!r} stores rows by group, but {types[0]} stores them"
            " in consecutive blocks",
            hint="blocks are written [(head dim | kv dim | kv dim) hidden]",
        )
    recorded = merge(records)
    warning = "" if not types or is_for(key_map, types) else _other_model(key_map, recorded, types)
    facts_known = facts(key_map, records, options.dims)
    if facts_known != facts(key_map, inside, options.dims):
        reason += f", with sizes from {', '.join(around)}"
    try:
        result = apply_map(catalog, key_map, facts_known)
    except UnknownSizes as error:
        raise _unknown_sizes(error, key_map) from None
    warnings = _compare_counts(key_map, catalog, result.catalog, recorded, whole=whole)
    config, lacks = (None, "")
    if key_map.target == HUGGING_FACE:
        config, lacks = recorded_config(inside, result.catalog)
        folders = [place.removesuffix(f"/{CONFIG}") for place in around if place.endswith(CONFIG)]
        if config is None and folders and options.assets is None:
            lacks += f" ({folders[0]} has one)"
    report = MapReport(
        key_map.name,
        key_map.source,
        key_map.target,
        reason,
        result.moves,
        result.excluded,
        result.computed,
        tuple(filter(None, [warning, *warnings, *_unusual(key_map)])),
        config,
        lacks,
    )
    return replace(result.catalog, notes=(*result.catalog.notes, *report.notes)), report


def _unusual(key_map: KeyMap) -> list[str]:
    """Return the warning that files of the map's models do not have experts as it makes them."""
    if key_map.source != PACKED or key_map.target == HUGGING_FACE:
        return []
    models = list_some(key_map.model_types)
    return [f"files of {models} have packed experts: transformers does not load separate ones"]


def _other_model(key_map: KeyMap, recorded: Record, types: Sequence[str]) -> str:
    """Return the warning about a map that is applied to a model that it is not for.

    Raises Unsupported if that model is known to compute something else.
    """
    is_for = f"{key_map.name} is for {', '.join(key_map.model_types)}"
    is_of = f"the model_type in config.json is {', '.join(types)}"
    differs = "" if key_map.source == PACKED else differing_function(recorded, types)
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
    if key_map.target == HUGGING_FACE or key_map.source not in (HUGGING_FACE, PACKED):
        way, catalog = key_map.inverse, target
    if way.source not in (HUGGING_FACE, PACKED):
        return []
    problems: list[str] = []
    lacking: list[str] = []
    counted: set[int] = set()
    for frame, names in match_names(catalog, way)[0].items():
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
    flags = " ".join(f"--dim {name}=N" for name in names)
    return _MissingSizes(
        f"map {key_map.name}: size of {', '.join(names)} not found in config",
        hint=f"pass {flags}, or --hf-assets FOLDER with a config.json that has {written}"
        if written
        else flags,
    )


def _keys(lookups: Sequence[str | int]) -> list[str]:
    """Return the keys of config.json among a dim's lookups, without expressions."""
    return [look for look in lookups if isinstance(look, str) and " " not in look]
