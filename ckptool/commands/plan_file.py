"""Placements that a file asks for: a TOML plan, or the tp_plan of a transformers config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptool.core.mesh import Mesh
from ckptool.core.placing import STYLES, Rule, parse_mesh, rule_of, split_placements
from ckptool.errors import UsageError


def read_plan(path: Path, mesh: Mesh | None = None) -> tuple[Mesh | None, list[Rule]]:
    """The mesh and rules of a TOML plan: ``mesh``, ``names``, ``[[rule]]`` tables in order.

    A ``mesh`` that is given goes before the plan's; the plan's names go to a mesh without.
    """
    try:
        import tomllib

        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--plan {path}: {error}") from None
    names, planned = content.get("names"), content.get("mesh")
    if mesh is None and isinstance(planned, str):
        mesh = parse_mesh(planned)
    if mesh is not None and mesh.names is None and isinstance(names, list):
        if len(names) != len(mesh.shape):
            raise UsageError(f"--plan {path}: {len(names)} names for {len(mesh.shape)} mesh dims")
        mesh = Mesh.of(mesh.shape, [str(name) for name in names])
    try:
        return mesh, [_planned_rule(rule) for rule in content.get("rule", [])]
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"--plan {path}: each [[rule]] needs tensor and placements") from None


def _planned_rule(rule: Mapping[str, Any]) -> Rule:
    placements = rule["placements"]
    words = split_placements(placements) if isinstance(placements, str) else placements
    return rule_of(str(rule["tensor"]), [str(word) for word in words])


def read_tp_plan(path: Path) -> list[Rule]:
    """The rules of a ``base_model_tp_plan`` or ``tp_plan`` in a transformers config.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--tp-plan {path}: {error}") from None
    plan: Any = None
    if isinstance(content, Mapping):
        plan = content.get("base_model_tp_plan") or content.get("tp_plan")
    if not isinstance(plan, Mapping) or not all(isinstance(word, str) for word in plan.values()):
        raise UsageError(f"--tp-plan {path}: no base_model_tp_plan or tp_plan in it")
    return [
        rule for module, style in plan.items() for rule in _module_rules(str(module), str(style))
    ]


def _module_rules(module: str, style: str) -> list[Rule]:
    globs = [f"*{module}.{leaf}*" for leaf in ("weight", "bias")]
    return [Rule(glob, style=_style(style), required=False) for glob in globs]


def _style(word: str) -> str:
    if word not in STYLES:
        raise UsageError(f"--tp-plan: unknown style {word!r}", hint="one of " + ", ".join(STYLES))
    return word
