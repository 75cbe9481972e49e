"""Keywords of the Python functions: check them, parse them, and build the commands' options.

``python -m ckptool.api.arguments`` writes ``keywords.py``, the same keywords for type checkers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ckptool.commands.options import parse_place
from ckptool.commands.options.bench import BenchOptions
from ckptool.commands.options.declaration import Option, OptionGroup, build, options_of
from ckptool.commands.options.diff import DiffOptions
from ckptool.commands.options.extract import ExtractOptions
from ckptool.commands.options.merge import MergeOptions
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, SaveOptions
from ckptool.commands.options.verify import (
    CompareOptions,
    LikeOptions,
    ManifestOptions,
    SalvageOptions,
    VerifyOptions,
)
from ckptool.storage.url import Location, storage_options

if TYPE_CHECKING:
    import torch

    AnyDType = str | torch.dtype
else:
    AnyDType = Any

AnyPath = str | os.PathLike[str]
"""A path or a URL."""

Strings = str | Sequence[str]
"""Several values, or a single one."""

Size = int | str
"""Bytes: a number, or a text with a unit (``"5GB"``, ``"512MiB"``)."""

Options = TypeVar("Options")

_UNSTACKED = ("split_stacked",)
_OF_RUNS = ("allow_nonfinite",)
KEYWORDS: dict[str, tuple[OptionGroup, ...]] = {
    "ReadKeywords": (OptionGroup(ReadOptions, without=_UNSTACKED),),
    "OpenKeywords": (OptionGroup(ReadOptions), OptionGroup(RewriteOptions)),
    "DiffKeywords": (OptionGroup(DiffOptions, without=("html",)),),
    "ExtractKeywords": (OptionGroup(ExtractOptions, without=("out",)),),
    "ConvertKeywords": (OptionGroup(ConvertOptions, without=("to",)),),
    "SaveKeywords": (OptionGroup(SaveOptions),),
    "ReshardKeywords": (OptionGroup(ReshardOptions),),
    "MergeKeywords": (OptionGroup(MergeOptions),),
    "VerifyRunKeywords": (OptionGroup(VerifyOptions, without=(*_UNSTACKED, "part")),),
    "VerifyKeywords": (
        OptionGroup(VerifyOptions, without=_OF_RUNS),
        OptionGroup(RewriteOptions),
        OptionGroup(LikeOptions),
        OptionGroup(ManifestOptions),
    ),
    "CompareKeywords": (
        OptionGroup(VerifyOptions, without=(*_OF_RUNS, "quick", "sample", "seed", "part")),
        OptionGroup(RewriteOptions),
        OptionGroup(CompareOptions),
    ),
    "SalvageKeywords": (OptionGroup(SalvageOptions),),
    "PruneKeywords": (OptionGroup(PruneOptions, without=("keep_last",)),),
    "BenchKeywords": (OptionGroup(BenchOptions),),
}
"""The options classes whose fields a function takes as keywords, by type name in ``keywords.py``.
"""


def location(path: AnyPath) -> Location:
    """Return where a checkpoint is, or will be: a path or a URL."""
    return parse_place(path, "path")


def keywords_of(name: str) -> dict[str, Option]:
    """Return the options of a type in ``keywords.py``, by keyword."""
    return {option.keyword: option for part in KEYWORDS[name] for option in options_of(part)}


class Keywords:
    """The keywords of one call; None means not given.

    Raises TypeError for an unknown keyword and for a value of the wrong type, UsageError for an
    invalid value.
    """

    def __init__(self, function: str, values: Mapping[str, Any], kind: type) -> None:
        hints, options = hints_of(kind), keywords_of(kind.__name__)
        self._parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in hints:
                raise _unknown(function, name, options)
            if value is None:
                continue
            if not _fits(value, hints[name]):
                call = f"{function}({name}={value!r}): a {type(value).__name__}"
                takes = f"{type_text(hints[name])} ({options[name].help})"
                raise TypeError(f"{call}, but it takes {takes}")
            self._parsed[name] = options[name].parse(value, name)

    def options(self, kind: type[Options], /, **fields: Any) -> Options:
        """Return the options of a class; ``fields`` are set as they are."""
        return build(OptionGroup(kind), self._parsed, **fields)  # type: ignore[no-any-return]


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the type of each keyword."""
    return get_type_hints(kind)


def type_text(hint: Any) -> str:
    """Return a type as it is written in source code."""
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = [str(arm) if get_args(arm) else arm.__name__ for arm in arms if arm is not NoneType]
    return " | ".join(name.replace("collections.abc.", "") for name in names)


def _unknown(function: str, name: str, options: Mapping[str, Option]) -> TypeError:
    renamed = {
        option.former[2:].replace("-", "_"): key for key, option in options.items() if option.former
    }
    close = [renamed[name]] if name in renamed else get_close_matches(name, options, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type, as a type checker would decide."""
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
    return origin is not Sequence or all(_fits(item, inner[0]) for item in value)


Function = TypeVar("Function", bound=Callable[..., Any])


class _Default:
    def __repr__(self) -> str:
        return "default"


_DEFAULT = _Default()


def with_keywords(kind: type) -> Callable[[Function], Function]:
    """Show the keywords of ``**options: Unpack[kind]`` in a function's signature and docstring.

    Type checkers understand ``Unpack``; this serves ``help``, ``?`` and completion. URLs are opened
    with the ``storage_option`` among the keywords.
    """

    def decorate(function: Function) -> Function:
        declared = signature(function)

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            storage = options.get("storage_option")
            with storage_options(storage if isinstance(storage, Mapping) else {}):
                return function(*arguments, **options)

        keywords = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=_DEFAULT, annotation=hint)
            for name, hint in hints_of(kind).items()
        ]
        rest = [p for p in declared.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        run.__signature__ = declared.replace(parameters=[*rest, *keywords])  # type: ignore[attr-defined]
        run.__doc__ = f"{function.__doc__ or ''}\n{_keyword_lines(kind)}"
        return run  # type: ignore[return-value]

    return decorate


def _keyword_lines(kind: type) -> str:
    rows = (f"{name}: {option.help}" for name, option in keywords_of(kind.__name__).items())
    lines = [wrap(row, 84, subsequent_indent="    ") for row in rows]
    return "\n".join(["    Keywords:", *(f"        {line}" for row in lines for line in row)])


def source_text() -> Iterator[str]:
    """Yield the lines of ``keywords.py``; a type inherits the keywords of earlier ones."""
    yield from _HEADER.splitlines()
    written: dict[str, dict[str, str]] = {"TypedDict": {}}
    for name, parts in KEYWORDS.items():
        hints = {
            keyword: option.kind.keyword + (" | None" if option.default is None else "")
            for keyword, option in keywords_of(name).items()
        }
        smaller = [
            base for base, inherited in written.items() if inherited.items() <= hints.items()
        ]
        base = max(smaller, key=lambda base: len(written[base]))
        classes = ", ".join(f"``{part.kind.__name__}``" for part in parts)
        yield from ("", "", f"class {name}({base}, total=False):")
        yield from (f'    """Keywords of {classes}."""', "")
        additions = [keyword for keyword in hints if keyword not in written[base]]
        yield from (f"    {keyword}: {hints[keyword]}" for keyword in additions)
        written[name] = hints


_HEADER = """\
\"\"\"Keywords of the Python functions, for type checkers.

Generated: ``python -m ckptool.api.arguments``.
\"\"\"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from ckptool.api.arguments import AnyDType, AnyPath, Size, Strings\
"""


if __name__ == "__main__":
    lines = "\n".join(source_text())
    Path(__file__).with_name("keywords.py").write_text(f"{lines}\n", encoding="utf-8")
