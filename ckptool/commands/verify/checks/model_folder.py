"""What lies beside the weights of a model's folder: its config.json, or an adapter's."""

from __future__ import annotations

import json

from ckptool.commands.keymap.assets import CONFIG
from ckptool.commands.keymap.config_check import config_problems
from ckptool.commands.keymap.model_record import read_beside
from ckptool.core.catalog import Catalog
from ckptool.errors import Problem, UsageError
from ckptool.formats.base import Format
from ckptool.storage.local import Files

_ADAPTER = "adapter_config.json"


def folder_problems(source: Files, row: Format, catalog: Catalog) -> list[Problem]:
    """Return that the config.json of a model's folder is missing, or does not fit the tensors."""
    if row.config is None:
        return []
    if CONFIG in source.files:
        try:
            return config_problems(read_beside(source, CONFIG), catalog)
        except UsageError as error:
            return [Problem(str(error), "metadata-unreadable", file=CONFIG)]
    if _ADAPTER in source.files:
        return [Problem(_adapter_note(source), "base-model-missing", file=_ADAPTER)]
    if row.config == "required":
        return [
            Problem(f"{CONFIG} not found: the model of these tensors is unknown", "config-missing")
        ]
    return []


def _adapter_note(source: Files) -> str:
    try:
        base = read_beside(source, _ADAPTER).get("base_model_name_or_path")
    except UsageError:
        base = None
    of = f", {json.dumps(base)}" if isinstance(base, str) and base else ""
    return f"an adapter; its base model{of} is not in this folder"
