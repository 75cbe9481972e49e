"""Signatures as ``help`` shows them: every keyword by name, with what it means."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from textwrap import wrap
from typing import Any, TypeVar, get_args

from ckptool.api.said import hints_of

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
