"""The options of every command, each declared once, without importing numpy or torch.

This module has the kinds of options whose values other parts of the package parse.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptool.commands.options.declaration import Kind, parse_dims, parse_share
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.storage.url import Location


def _texts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _file(value: Any, name: str) -> Path:
    if "://" in str(value):
        raise UsageError(f"{name} {value}: needs a local path, not a URL")
    return Path(_named(value, name))


def parse_place(value: Any, name: str) -> Location:
    """Return the path or URL of an argument; UsageError if it is empty, as an unset variable is."""
    from ckptool.storage.url import location

    return location(_named(value, name))


def _named(value: Any, name: str) -> str:
    """Return the text of a path that is not empty: that would be the current folder."""
    text = os.fsdecode(value)
    if not text:
        raise UsageError(f"{name}: empty path", hint="is a variable of the shell not set?")
    return text


def _tp_rules(value: Any, name: str) -> Any:
    from ckptool.core.sharding.tensor_parallel import parse_tp_rules

    return parse_tp_rules(_texts(value))


def _mesh(value: str, name: str) -> Any:
    from ckptool.core.sharding.placement import parse_mesh

    return parse_mesh(value)


def _shard_rules(value: Any, name: str) -> Any:
    from ckptool.core.sharding.placement import parse_rule

    return tuple(map(parse_rule, _texts(value)))


def _casts(value: Any, name: str) -> Any:
    from ckptool.core.casts import parse_casts

    return parse_casts([str(text) for text in _texts(value)])


def _duration(value: Any, name: str) -> float:
    from ckptool.commands.bench.cost import parse_duration

    return parse_duration(value, name)


def _interval(value: Any, name: str) -> Any:
    from ckptool.commands.bench.cost import parse_interval

    return parse_interval(value, name)


def _share(value: Any, name: str, *, is_part: bool = False) -> float:
    return parse_share(str(value), name, is_part=is_part)


def _part(value: Any, name: str) -> Any:
    from ckptool.engine.share import parse_part

    return parse_part(str(value), name)


def _dims(value: Any, name: str) -> Mapping[str, int]:
    is_table = isinstance(value, Mapping)
    return parse_dims([f"{dim}={size}" for dim, size in value.items()] if is_table else value)


def _metadata(value: Any, name: str) -> Mapping[str, str]:
    """Return texts given as KEY=TEXT, where the text may be empty."""
    if isinstance(value, Mapping):
        return value
    pairs = [str(text).partition("=") for text in _texts(value)]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise UsageError(
                f"invalid {name} {key!r}: expected KEY=TEXT",
                hint=f"such as {name} format=pt; --drop-metadata KEY leaves one out",
            )
    return {key: text for key, _, text in pairs}


def _storage_options(value: Any, name: str) -> Mapping[str, Any]:
    """Return options given as KEY=VALUE: JSON values are parsed, all others are text."""
    if isinstance(value, Mapping):
        return value
    options = {}
    for text in _texts(value):
        key, equals, written = text.partition("=")
        if not equals or not key.isidentifier():
            hint = f"such as {name} anon=true; see ckptool help stores"
            raise UsageError(f"invalid {name} {key!r}: expected KEY=VALUE", hint=hint)
        try:
            options[key] = json.loads(written)
        except ValueError:
            options[key] = written
    return options


FILE = Kind(str, "AnyPath", _file, metavar="FILE")
PLACE = Kind(str, "AnyPath", parse_place)
PART = Kind(str, "str", _part, metavar="K/N")
PART_OF_ALL = Kind(str, "float | str", partial(_share, is_part=True), metavar="SHARE")
SHARE = Kind(str, "float | str", _share, metavar="SHARE")
DURATION = Kind(str, "float | str", _duration, metavar="TIME")
INTERVAL = Kind(str, "float | str", _interval, metavar="TIME|STEPS")
TP_RULES = Kind(list[str], "Strings", _tp_rules, (), "NAME=RULE")
MESH = Kind(str, "str", _mesh, metavar="MESH")
SHARD_RULES = Kind(list[str], "Strings", _shard_rules, (), "NAME=PLACEMENTS")
CASTS = Kind(list[str], "AnyDType | Sequence[AnyDType]", _casts)
DIMS = Kind(list[str], "Mapping[str, int]", _dims)
METADATA = Kind(list[str], "Mapping[str, str]", _metadata)
STORAGE_OPTIONS = Kind(list[str], "Mapping[str, object]", _storage_options)
