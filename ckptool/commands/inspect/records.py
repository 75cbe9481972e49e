"""The data in inert records of pickles: namespaces, dataclasses, enums, dates, numbers.

Nothing is imported or called for them, and nothing is invented that a record does not contain.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

from ckptool.serialization.pickle.globals import is_numpy
from ckptool.serialization.pickle.records import Call, Global

_NOT_SHOWN = ("torch", "numpy", "_codecs", "copyreg")
"""Packages whose records are tensors, arrays and their parts."""
_NUMPY_KINDS = "biufcUSMm"


def simple_value(call: Call) -> Any:
    """Return the number, date or path that a record represents, None for any other.

    Dates and times are ``datetime`` objects, complex and extended numpy numbers Python ones.
    """
    try:
        if isinstance(call.function, Global) and is_numpy(call.function):
            return _numpy_scalar(call) if call.function.name == "scalar" else None
        make = _SIMPLE.get(call.name)
        return None if make is None or call.is_new or call.is_filled else make(*call.args)
    except (TypeError, ValueError, OverflowError, LookupError, AttributeError):
        return None  # a record that contradicts itself is shown by its name


def _numpy_scalar(call: Call) -> Any:
    """Return a scalar of a plain element type."""
    import numpy as np

    described, data = call.args
    text: Any = described.args[0]
    order: Any = described.state[1] if described.state else "="
    if not isinstance(text, str) or text.lstrip("<>=|")[:1] not in _NUMPY_KINDS:
        return None
    if text[:1] in "Mm":
        unit, count = described.state[8][1][0].decode(), described.state[8][1][1]
        text = f"{text}[{count}{unit}]"
    kind = np.dtype(text)
    kind = kind.newbyteorder(order) if order in ("<", ">") else kind
    if not isinstance(data, bytes) or len(data) != kind.itemsize:
        return None
    value = np.frombuffer(data, kind, 1)[0]
    return str(value) if text[:1] in "Mm" else value.item()


def _datetime(data: bytes, zone: Call | None = None) -> datetime:
    year, micro = data[0] << 8 | data[1], data[7] << 16 | data[8] << 8 | data[9]
    day, hour, minute, seconds = data[3:7]
    return datetime(year, data[2] & 0x7F, day, hour, minute, seconds, micro, _zone(zone))


def _date(data: bytes) -> date:
    return date(data[0] << 8 | data[1], data[2], data[3])


def _time(data: bytes, zone: Call | None = None) -> time:
    return time(data[0] & 0x7F, data[1], data[2], data[3] << 16 | data[4] << 8 | data[5],
                _zone(zone))  # fmt: skip


def _zone(zone: Call | None) -> timezone | None:
    if zone is None:
        return None
    if zone.name != "datetime.timezone" or not isinstance(zone.args[0], Call):
        raise ValueError  # a user's own class: its name does not say what it is
    return timezone(timedelta(*zone.args[0].args))


def _path(*parts: str) -> str:
    return "/".join(parts).replace("//", "/") or "."


_SIMPLE: dict[str, Callable[..., Any]] = {
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.timedelta": timedelta,
    **{f"pathlib.{kind}Path": _path for kind in ("Posix", "PurePosix", "Windows", "PureWindows")},
    "decimal.Decimal": lambda text: text,
}


def content_of(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments and attributes of a record, None if it has none to show."""
    function = call.function
    if not isinstance(function, Global) or function.module.partition(".")[0] in _NOT_SHOWN:
        return None
    fields = call.fields
    if call.is_filled or not all(isinstance(key, str) for key in fields):
        return None
    return (call.args, fields) if call.args or fields else None


def parts_of(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and attributes of an object, or what a node of omegaconf holds by name.

    A value that is no object has none.
    """
    content = unwrap(value)
    if isinstance(content, Call):
        return ((), {}) if simple_value(content) is not None else content_of(content) or ((), {})
    return (), content if content is not value and isinstance(content, dict) else {}


def unwrap(value: Any) -> Any:
    """Return what a node of omegaconf (2.0 to 2.4) holds beside its metadata and its parent.

    Any other value is returned as it is.
    """
    if isinstance(value, Call) and value.name.startswith("omegaconf."):
        values = [value.fields[key] for key in ("_content", "_val") if key in value.fields]
        return values[0] if len(values) == 1 and not value.is_filled else value
    return value
