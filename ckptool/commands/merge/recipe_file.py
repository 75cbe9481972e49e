"""Read a recipe's TOML file: its keys are options, parsed and checked as on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from msgspec import ValidationError, convert

from ckptool.commands.options.declaration import Option, OptionGroup, options_of
from ckptool.commands.options.files import table_of
from ckptool.commands.options.merge import ExpressionOptions
from ckptool.core.text import nearest
from ckptool.errors import UsageError
from ckptool.storage.url import Location, location

_SOURCES = "sources"
_TABLES: Mapping[str, Any] = {
    _SOURCES: list[str],
    "weights": list[float],
    "take": dict[str, str],
    "rows": dict[str, int],
}
"""The types of the keys that have several values; the others have those of the command line."""
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[str]: "a list of texts",
    list[float]: "a list of numbers",
    dict[str, str]: "a table of names and texts",
    dict[str, int]: "a table of names and whole numbers",
}
_PLACES = ("onto", "lora", "add", "minus")


def read_file(path: Path) -> tuple[list[Location], ExpressionOptions]:
    """Return the sources and options of a recipe's file; UsageError if it is none."""
    content = table_of(path, "--recipe")
    declared = {
        option.flag.removeprefix("--"): option
        for option in options_of(OptionGroup(ExpressionOptions))
        if option.flag != "--recipe"
    }
    try:
        return _read(content, declared, path.parent)
    except UsageError as error:
        raise error.within(f"--recipe {path}") from None


def _read(
    content: Mapping[str, Any], declared: Mapping[str, Option], folder: Path
) -> tuple[list[Location], ExpressionOptions]:
    sources, values = list[Location](), dict[str, Any]()
    for key, value in content.items():
        option = declared.get(key)
        if key == _SOURCES:
            sources = [location(_place(text, key, folder)) for text in _parse(key, value, str)]
        elif option is None:
            raise _unknown(key, [_SOURCES, *declared])
        else:
            argument = _parse(key, value, option.kind.line)
            if key in _PLACES:
                argument = _place(argument, key, folder)
            elif key == "take":
                argument = {name: _place(text, key, folder) for name, text in argument.items()}
            values[option.field] = option.parse(argument, key)
    return sources, ExpressionOptions(**values)


def _parse(key: str, value: Any, line: Any) -> Any:
    """Return a value in the type of its key; UsageError if it has another."""
    kind = _TABLES.get(key, line)
    try:
        return convert(value, kind)
    except (ValidationError, OverflowError):
        raise UsageError(f"{key} = {shortened(value)}: not {_WORDS[kind]}") from None


def _place(text: str, key: str, folder: Path) -> str:
    """Return a place, relative to a folder unless it is a URL."""
    if not text or "\0" in text:
        raise UsageError(f"{key} = {text!r}: not a path")
    if "://" in text:
        return text
    try:
        return str(folder / Path(text).expanduser())
    except RuntimeError:
        raise UsageError(f"{key} = {text!r}: no such user's home") from None


def _unknown(key: str, keys: list[str]) -> UsageError:
    close = nearest(key.replace("_", "-"), keys)
    hint = f"the keys are {', '.join(keys)}" if close is None else f"did you mean {close}?"
    return UsageError(f"unknown key {key!r}", hint=hint)
