"""The JSON of a report, derived from its dataclass: keys are the names of its fields.

``nbytes`` has the key ``bytes``; a field whose metadata has ``key`` is under that key, or omitted
if that is None. Counts, whose metadata has ``total``, are under ``totals``, so that ``tensors`` and
``values`` of a report are always lists. Properties that a class names in ``computed`` come last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from pathlib import PurePath
from typing import Any, ClassVar

VERSION = 2
"""The major version of all schemas that ``--json`` prints."""


TOTAL: Mapping[str, Any] = {"total": None}
"""The metadata of a counting field: JSON has it under ``totals``, by its own or another name."""


class Report:
    """What a command found or did; its ``schema`` is that of ``to_dict``."""

    __slots__ = ()
    schema: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return document(self.schema, self, **self.more())

    def more(self) -> Mapping[str, object]:
        """Return what ``to_dict`` has besides the fields."""
        return {}

    def __bool__(self) -> bool:
        """Return the report's ``ok``; a report without it is true."""
        return bool(getattr(self, "ok", True))

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self._short().items())
        return f"<ckptool.{type(self).__name__} {said}>"

    def _repr_html_(self) -> str:
        said = {name: escape(str(value)) for name, value in self._short().items()}
        rows = (f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in said.items())
        return f"<table>{''.join(rows)}</table>"

    def _short(self) -> dict[str, Any]:
        """Return the fields that are single numbers, texts, paths or booleans."""
        names = (*(f.name for f in fields(self)), *getattr(self, "computed", ()))  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names}
        shown = {name: str(v) if isinstance(v, PurePath) else v for name, v in values.items()}
        return {name: v for name, v in shown.items() if isinstance(v, bool | int | float | str)}


def document(schema: str, report: object = None, **more: object) -> dict[str, Any]:
    """Return a report as one JSON object that begins with its ``schema``; ``more`` is added."""
    content = {} if report is None else plain(report)
    extra = {key: plain(value) for key, value in more.items()}
    return {"schema": f"ckptool.{schema}/{VERSION}"} | content | extra


def plain(value: object) -> Any:
    """Return a JSON form of a value: infinite and NaN floats, and paths, as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _content(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | Set):
        return [plain(inner) for inner in value]
    return str(value)


def _content(report: Any) -> dict[str, Any]:
    renamed = {"nbytes": "bytes"}
    content: dict[str, Any] = {}
    totals: dict[str, Any] = {}
    for each in fields(report):
        name, value = renamed.get(each.name, each.name), getattr(report, each.name)
        if "total" in each.metadata:
            totals[each.metadata["total"] or name] = plain(value)
        elif (key := each.metadata.get("key", name)) is not None:
            content[key] = plain(value)
    computed = getattr(report, "computed", ())
    content |= {"totals": totals} if totals else {}
    return content | {name: plain(getattr(report, name)) for name in computed}
