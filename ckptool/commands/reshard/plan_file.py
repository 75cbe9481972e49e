"""Placements from a file: a TOML plan, or the tp_plan of a transformers config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptool.commands.options.files import table_of, text_of
from ckptool.core.mesh import Mesh
from ckptool.core.sharding.placement import (
    STYLES,
    PlacementRule,
    parse_mesh,
    rule_of,
    split_placements,
)
from ckptool.core.text import did_you_mean
from ckptool.errors import UsageError

_KEYS, _RULE_KEYS = ("mesh", "names", "rule"), ("tensor", "placements")
_SHOWN = "`ckptool help reshard` shows a plan"


def read_plan(path: Path, mesh: Mesh | None = None) -> tuple[Mesh | None, list[PlacementRule]]:
    """Read the mesh and rules of a TOML plan: ``mesh``, ``names``, ``[[rule]]`` tables in order.

    A given ``mesh`` overrides the plan's; a mesh without names gets the plan's. Raises UsageError
    if the file cannot be read, or has any other key.
    """
    where, content = f"--plan {path}", table_of(path, "--plan", _SHOWN)
    _require_keys(content, _KEYS, where)
    mesh = mesh or _planned_mesh(content.get("mesh"), where)
    names = _planned_names(content.get("names"), where)
    if mesh is not None and names is not None and mesh.names is None:
        if len(names) != len(mesh.shape):
            raise UsageError(f"{where}: {len(names)} names for {len(mesh.shape)} mesh dims")
        mesh = Mesh.of(mesh.shape, names)
    rules = content.get("rule", [])
    if not isinstance(rules, list):
        raise UsageError(f"{where}: each [[rule]] needs tensor and placements")
    return mesh, [_planned_rule(rule, where) for rule in rules]


def _require_keys(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    unknown = [key for key in table if key not in keys]
    if unknown:
        message = f"{where}: {unknown[0]!r} is not one of {', '.join(keys)}"
        raise UsageError(message, hint=did_you_mean(unknown[0], keys, _SHOWN))


def _planned_mesh(mesh: Any, where: str) -> Mesh | None:
    if mesh is not None and not isinstance(mesh, str):
        raise UsageError(f'{where}: mesh = {mesh!r} must be text such as "2x4" or "dp=2,tp=4"')
    return None if mesh is None else parse_mesh(mesh)


def _planned_names(names: Any, where: str) -> list[str] | None:
    if names is None:
        return None
    is_list = isinstance(names, list) and all(isinstance(name, str) and name for name in names)
    if not is_list or len(set(names)) != len(names):
        raise UsageError(f'{where}: names = {names!r} must be a list such as ["dp", "tp"]')
    return list(names)


def _planned_rule(rule: Any, where: str) -> PlacementRule:
    if not isinstance(rule, Mapping) or not all(rule.get(key) for key in _RULE_KEYS):
        raise UsageError(f"{where}: each [[rule]] needs tensor and placements")
    _require_keys(rule, _RULE_KEYS, f"{where}: [[rule]]")
    placements = rule["placements"]
    words = split_placements(placements) if isinstance(placements, str) else placements
    if not isinstance(words, list):
        raise UsageError(f"{where}: placements = {placements!r} must be a list of placements")
    return rule_of(str(rule["tensor"]), [str(word) for word in words])


def read_tp_plan(path: Path) -> list[PlacementRule]:
    """Read the rules of a ``base_model_tp_plan`` or ``tp_plan`` in a transformers config.json."""
    try:
        content = json.loads(text_of(path, "--tp-plan"))
    except (ValueError, RecursionError) as error:
        hint = "it is the config.json of a transformers model"
        raise UsageError(f"--tp-plan {path}: not JSON: {error}", hint=hint) from None
    plan: Any = None
    if isinstance(content, Mapping):
        plan = content.get("base_model_tp_plan") or content.get("tp_plan")
    if not isinstance(plan, Mapping) or not all(isinstance(word, str) for word in plan.values()):
        raise UsageError(f"--tp-plan {path}: base_model_tp_plan or tp_plan not found")
    unknown = [style for style in plan.values() if style not in STYLES]
    if unknown:
        styles = ", ".join(STYLES)
        raise UsageError(f"--tp-plan: unknown style {unknown[0]!r}", hint=f"one of {styles}")
    return [
        PlacementRule(f"*{module}.{leaf}*", style=style, required=False)
        for module, style in plan.items()
        for leaf in ("weight", "bias")
    ]
