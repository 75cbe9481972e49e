"""The JSON of a report, derived from its Struct: keys are the names of its fields.

``nbytes`` has the key ``bytes``; a field made with ``field(name=...)`` is under that key, or
omitted if it begins with ``_``. Counts are named ``totals.tensors`` and so on: they are under
``totals``, so that ``tensors`` and ``values`` of a report are always lists. Properties that a class
names in ``computed`` come last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from datetime import datetime
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar

from msgspec import Struct

from ckptool.core.mesh import Mesh

VERSION = 2
"""The major version of all schemas that ``--json`` prints."""


class Report(Struct, frozen=True):
    """What a command found or did; its ``schema`` is that of ``to_dict``."""

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
        text = ", ".join(f"{name}={value!r}" for name, value in self._short().items())
        return f"<ckptool.{type(self).__name__} {text}>"

    def _repr_html_(self) -> str:
        rows = self._short().items()
        return table_html(cells_html("th", [key]) + cells_html("td", [cell]) for key, cell in rows)

    def _short(self) -> dict[str, Any]:
        """Return the fields that are single numbers, texts, paths or booleans."""
        names = (*self.__struct_fields__, *getattr(self, "computed", ()))
        values = {name: getattr(self, name) for name in names}
        shown = {name: str(v) if isinstance(v, PurePath) else v for name, v in values.items()}
        return {name: v for name, v in shown.items() if isinstance(v, bool | int | float | str)}


def document(schema: str, report: object = None, **more: object) -> dict[str, Any]:
    """Return a report as one JSON object that begins with its ``schema``; ``more`` is added."""
    content = {} if report is None else plain(report)
    extra = {key: plain(value) for key, value in more.items()}
    return {"schema": f"ckptool.{schema}/{VERSION}"} | content | extra


def cells_html(tag: str, cells: Iterable[object]) -> str:
    """Return cells of a row of a table in a notebook: ``th`` or ``td``."""
    from html import escape

    return "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells)


def table_html(rows: Iterable[str]) -> str:
    """Return a table for a notebook, whose rows are made of ``cells_html``."""
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


_PLAIN = frozenset([type(None), bool, int, str])


def plain(value: object) -> Any:
    """Return a JSON form of a value: infinite and NaN floats, paths and times as text."""
    if type(value) in _PLAIN or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mesh):
        return {"shape": plain(value.shape), "names": plain(value.names)}
    if isinstance(value, Struct):
        return _content(value)
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | Set):
        return [plain(inner) for inner in value]
    return str(value)


def _content(report: Struct) -> dict[str, Any]:
    content: dict[str, Any] = {}
    totals: dict[str, Any] = {}
    for name, key in zip(report.__struct_fields__, report.__struct_encode_fields__, strict=True):
        if key.startswith("totals."):
            totals[key.removeprefix("totals.")] = plain(getattr(report, name))
        elif not key.startswith("_"):
            content["bytes" if key == "nbytes" else key] = plain(getattr(report, name))
    computed = getattr(report, "computed", ())
    content |= {"totals": totals} if totals else {}
    return content | {name: plain(getattr(report, name)) for name in computed}
