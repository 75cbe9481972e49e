"""What a call says by keyword: checked, and made the values that commands take.

Signatures as ``help`` shows them: every keyword by name, with what it means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache, partial
from inspect import Parameter, signature
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ckptool.api.keywords import AnyPath, Size
from ckptool.commands.keymap.options import MapOptions
from ckptool.commands.open import ReadOptions
from ckptool.commands.rewrite import RewriteOptions
from ckptool.commands.selection import Selection
from ckptool.commands.transfer import TransferOptions
from ckptool.core.casts import NO_CASTS, Casts, parse_casts
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.core.sharding.tensor_parallel import parse_tp_rules
from ckptool.core.units import parse_share, parse_size
from ckptool.engine.write.run import RunOptions
from ckptool.errors import UsageError
from ckptool.storage import url as remote_path
from ckptool.storage.url import Location

Options = TypeVar("Options")


def location(path: AnyPath) -> Location:
    """Where a checkpoint lies, or shall: a path or a URL."""
    return remote_path.location(os.fspath(path))


def _strings(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _at_least(least: float, name: str, value: Any) -> Any:
    if value < least:
        raise UsageError(f"{name} {value}: at least {least}")
    return value


def _bytes(name: str, value: Size) -> int:
    return parse_size(str(value), name)


def _local(value: AnyPath) -> Path:
    if "://" in os.fspath(value):
        raise UsageError(f"{os.fspath(value)}: a path of this machine is wanted, no URL")
    return Path(value)


_PARSED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("select", "drop", "rename", "ignore", "strategies"), _strings),
    **dict.fromkeys(("flat_params", "hf_assets", "plan", "tp_plan"), _local),
    **dict.fromkeys(("manifest", "write_manifest", "like", "out"), location),
    **{name: partial(_at_least, 1, name) for name in ("workers", "ranks", "repeat", "world_size")},
    **{name: partial(_at_least, 0, name) for name in ("rtol", "atol")},
    **{name: partial(_bytes, name) for name in ("budget", "max_shard_size", "size")},
    "sample": lambda value: parse_share(str(value), "sample"),
    "tp_rule": lambda texts: parse_tp_rules(_strings(texts)),
    "mesh": parse_mesh,
    "shard": lambda texts: tuple(map(parse_rule, _strings(texts))),
    "dtype": lambda value: parse_casts([str(one) for one in _several(value)]),
}

_FIELDS = {
    "from_format": "format_name",
    "against_from": "other_format",
    "tp_rule": "tp_rules",
    "dim": "dims",
    "hf_assets": "assets",
    "map": "name",
    "shard": "rules",
    "plan": "plan_file",
}
"""Keywords that the fields of the commands' options call otherwise."""


class Said:
    """The keywords of one call, taken one kind of options after another.

    None is as if nothing were said. Raises TypeError for a keyword that the function does not
    have and for a value of another type, UsageError for a value that makes no sense.
    """

    def __init__(self, function: str, keywords: Mapping[str, Any], known: type) -> None:
        hints = hints_of(known)
        for name, value in keywords.items():
            if name not in hints:
                raise _unknown(function, name, list(hints))
            kind, meaning = get_args(hints[name])
            if value is not None and not _fits(value, kind):
                said = f"{function}({name}={value!r}): a {type(value).__name__}"
                raise TypeError(f"{said}, where it takes {told(kind)} ({meaning})")
        self._said = {
            _FIELDS.get(name, name): _PARSED.get(name, lambda value: value)(value)
            for name, value in keywords.items()
            if value is not None
        }

    def get(self, name: str, default: Any = None) -> Any:
        """One value by itself."""
        return self._said.get(name, default)

    def options(self, kind: Callable[..., Options], **more: Any) -> Options:
        """The options of a kind: what is said of its fields, and what is given here."""
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: self._said[name] for name in names if name in self._said} | more)

    def reading(self) -> ReadOptions:
        return self.options(ReadOptions)

    def mapping(self) -> MapOptions:
        return self.options(MapOptions)

    def rewriting(self) -> RewriteOptions:
        casts: Casts = self.get("dtype", NO_CASTS)
        return self.options(
            RewriteOptions,
            selection=self.options(Selection),
            map=self.mapping(),
            dtype=casts.model,
            dtype_rules=casts.rules,
        )

    def transfer(self, **more: Any) -> TransferOptions:
        return self.options(TransferOptions, run=self.options(RunOptions), **more)


@cache
def hints_of(known: type) -> dict[str, Any]:
    """Each keyword with its type and what it means."""
    return get_type_hints(known, include_extras=True)


def told(hint: Any) -> str:
    """A type as people write it."""
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = [str(arm) if get_args(arm) else arm.__name__ for arm in arms if arm is not NoneType]
    return " | ".join(name.replace("collections.abc.", "") for name in names)


def _unknown(function: str, name: str, known: Sequence[str]) -> TypeError:
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r} ?" if close else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as a type checker would say it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arm) for arm in inner)
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if origin is None:
        return isinstance(value, hint)
    if not isinstance(value, origin):
        return False
    if isinstance(value, Mapping):
        return all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return origin is not Sequence or all(_fits(one, inner[0]) for one in value)


Function = TypeVar("Function", bound=Callable[..., Any])


class _Default:
    def __repr__(self) -> str:
        return "default"


_DEFAULT = _Default()


def documented(known: type) -> Callable[[Function], Function]:
    """Name the keywords of ``**options: Unpack[known]`` in a function's signature and docstring.

    Type checkers see ``Unpack``; this is for ``help``, ``?`` and completion.
    """

    def with_names(function: Function) -> Function:
        said = signature(function)
        keywords = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=_DEFAULT, annotation=get_args(hint)[0])
            for name, hint in hints_of(known).items()
        ]
        plain = [one for one in said.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        function.__signature__ = said.replace(parameters=[*plain, *keywords])  # type: ignore[attr-defined]
        function.__doc__ = f"{function.__doc__ or ''}\n{_listed(known)}"
        return function

    return with_names


def _listed(known: type) -> str:
    rows = (f"{name}: {get_args(hint)[1]}" for name, hint in hints_of(known).items())
    lines = [wrap(row, 84, subsequent_indent="    ") for row in rows]
    return "\n".join(["    Keywords:", *(f"        {line}" for row in lines for line in row)])
