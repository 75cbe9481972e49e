"""Options, each declared once: as a field of the options class of its command.

The command line (``cli/parameters.py``), the keywords of the Python functions
(``api/arguments.py``) and their help derive from fields made by ``option``. A field made by
``group`` nests another class. Sizes, fractions and dims are parsed from text.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from keyword import iskeyword
from types import MappingProxyType
from typing import Any

from msgspec import NODEFAULT, Struct, StructMeta, field
from msgspec.structs import replace

from ckptool.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_whole(text: str) -> int | None:
    """Return the whole number that a text is; None for any other, and for 16 digits and more.

    No size or number of anything has so many, and Python refuses to parse thousands.
    """
    return int(text) if text.isdecimal() and len(text) < 16 else None


def parse_size(text: str, option: str) -> int:
    """Return the bytes of ``5GB``, ``512MiB`` or ``1000``; UsageError if it is not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * unit if match and unit else 0
    if not 1 <= size < math.inf:
        raise UsageError(
            f"invalid {option} {text!r}: not a size", hint="such as 512MiB, 5GB or 1000000"
        )
    return int(size)


def parse_share(text: str, option: str, *, is_part: bool = False) -> float:
    """Return 0.05 for ``5%`` or ``0.05``; UsageError if it is no share, or no part of a whole."""
    match = re.fullmatch(r"\s*(\d*\.?\d+(?:e-?\d+)?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else math.inf
    if not (0 < share <= 1 if is_part else share < math.inf):
        raise UsageError(f"invalid {option} {text!r}: not a fraction", hint="such as 5% or 0.05")
    return share


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Return the sizes of named dims; UsageError if one is not NAME=SIZE."""
    sizes: dict[str, int] = {}
    for text in texts:
        dim, _, written = map(str.strip, text.partition("="))
        size = parse_whole(written)
        if not dim or size is None:
            raise UsageError(
                f"invalid --dim {text!r}: expected NAME=SIZE", hint="such as --dim head=32"
            )
        if sizes.setdefault(dim, size) != size:
            raise UsageError(f"--dim {dim}: conflicting sizes {sizes[dim]} and {size}")
    return sizes


class Kind(Struct, frozen=True):
    """Values of an option: their types on the command line and as a keyword, and how to parse both.

    ``keyword`` is source text, for the generated signatures. ``parse`` is called with a value of
    either type and the option's name, for errors. ``metavar`` and ``default`` are those of most
    options of the kind; each value is so many ``words`` of the command line.
    """

    line: Any
    keyword: str
    parse: Callable[[Any, str], Any] = lambda value, name: value
    default: Any = None
    metavar: str | None = None
    words: int = 1


def _texts(value: str | Collection[str], name: str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _list(value: str | Collection[str], name: str) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    return tuple(word.strip() for word in words if word.strip())


def _finite(value: float, name: str) -> float:
    if not abs(value) <= sys.float_info.max:
        raise UsageError(f"{name} {value}: not a finite number")
    return value


FLAG = Kind(bool, "bool", default=False)
TEXT = Kind(str, "str")
TEXTS = Kind(list[str], "Strings", _texts, ())
LIST = Kind(str, "Strings", _list, (), "LIST")
COUNT = Kind(int, "int", metavar="N")
NUMBER = Kind(float, "float", _finite, metavar="X")
SIZE = Kind(str, "Size", lambda value, name: parse_size(str(value), name), metavar="SIZE")


SPEED = "Speed and screen"
RARE = "Rarely needed"
"""The last panels of the help, the second of which only ``--help-all`` shows."""
RUNS = "Runs (folders of steps)"


class Option(Struct, frozen=True):
    """One option. ``shown`` is the default as displayed, ``former`` the flag's old name.

    ``choices`` returns its named values, for completion, which otherwise ``completes_names`` of the
    checkpoint's tensors. ``panel`` is the help's; that of its group comes before it, unless it is
    one of the last. ``field`` is the name of the field that it declares.
    """

    flag: str
    kind: Kind
    help: str
    default: Any
    short: str | None = None
    metavar: str | None = None
    shown: str | None = None
    minimum: int | None = None
    maximum: int | None = None
    panel: str | None = None
    former: str | None = None
    choices: Callable[[], Iterable[str]] | None = None
    completes_names: bool = False
    field: str = ""

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is NODEFAULT

    @property
    def keyword(self) -> str:
        """The name in Python: the flag's, or the field's where Python keeps that for itself."""
        word = self.flag.partition("/")[0].removeprefix("--").replace("-", "_")
        return self.field if iskeyword(word) else word

    def parse(self, value: Any, name: str) -> Any:
        """Return the value for the field. Raises UsageError if it is invalid."""
        if self.minimum is not None and value < self.minimum:
            raise UsageError(f"{name} {value}: at least {self.minimum}")
        if self.maximum is not None and value > self.maximum:
            raise UsageError(f"{name} {value}: at most {self.maximum}")
        return self.kind.parse(value, name)


def option(flag: str, kind: Kind = TEXT, *, help: str, default: Any = ..., **more: Any) -> Any:
    """Declare a field that is an option; ``more`` are fields of ``Option``."""
    default = kind.default if default is ... else default
    return Option(flag, kind, help, default, **{"metavar": kind.metavar, **more})


class OptionGroup(Struct, frozen=True):
    """A nested class of options: its help panel, omitted keywords, defaults that differ."""

    kind: Any = None
    panel: str | None = None
    without: Collection[str] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})


def group(kind: Any, panel: str | None = None, without: Collection[str] = (), **other: Any) -> Any:
    """Declare a field with nested options; ``other`` are defaults that differ there."""
    return OptionGroup(kind, panel, without, other)


class _OptionMeta(StructMeta):
    """Keeps what fields declare in ``declared``, and leaves their defaults to the Struct."""

    declared: Mapping[str, Option | OptionGroup]

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _OptionMeta:
        declared: dict[str, Option | OptionGroup] = {}
        for base in bases:
            declared |= getattr(base, "declared", {})
        for key, value in body.items():
            if isinstance(value, Option):
                declared[key] = replace(value, field=key)
                body[key] = value.default
            elif isinstance(value, OptionGroup):
                declared[key] = value
                body[key] = field(default_factory=partial(value.kind, **value.defaults))
        body["declared"] = declared
        return super().__new__(cls, name, bases, body, frozen=True)


class OptionSet(Struct, metaclass=_OptionMeta):
    """Related options: a class whose fields are options, immutable, equal by value."""


def options_of(part: OptionGroup) -> Iterator[Option]:
    """Yield the options of a class and of all nested ones, in order."""
    for name, item in part.kind.declared.items():
        if isinstance(item, OptionGroup):
            without = {*part.without, *item.without}
            yield from options_of(replace(item, panel=part.panel or item.panel, without=without))
        elif item.keyword not in part.without:
            option = replace(item, default=part.defaults.get(name, item.default))
            is_last = option.panel in (SPEED, RARE)
            yield option if is_last else replace(option, panel=part.panel or option.panel)


def build(part: OptionGroup, values: Mapping[str, Any], /, **fields: Any) -> Any:
    """Build options from parsed values by keyword; ``fields`` are set unchanged."""
    arguments = {**part.defaults, **fields}
    for name, item in part.kind.declared.items():
        if name in fields:
            continue
        if isinstance(item, OptionGroup):
            arguments[name] = build(item, values)
        elif item.keyword in values:
            arguments[name] = values[item.keyword]
    return part.kind(**arguments)


def changed(options: OptionSet) -> list[str]:
    """Return the flags of the options that are not at their defaults."""
    flags = []
    for name, item in type(options).declared.items():
        value = getattr(options, name)
        if isinstance(item, OptionGroup):
            flags += changed(value)
        elif not item.required and value != item.default:
            flags.append(item.flag.partition("/")[0])
    return flags
