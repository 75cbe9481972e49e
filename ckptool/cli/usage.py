"""Wrong words on the command line, answered as every other error is: what, why, and what works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

from typer.core import TyperCommand

from ckptool.errors import UsageError

RENAMED = {"--map": "--shards", "--ranks": "--rank-bytes", "--junit": "--format junit"}
"""New names of options by former ones, which other commands still have."""
_HELP = "NoArgsIsHelpError"
"""The name of the error with which typer shows the help of a command without words."""


class Command(TyperCommand):
    """A command whose wrong words are answered with the ones that it has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line; UsageError if they are wrong."""
        with answering(ctx):
            return super().parse_args(ctx, args)


@contextmanager
def answering(ctx: Any) -> Iterator[None]:
    """Raise UsageError, with a hint, for typer's own errors on words of the command of ``ctx``."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message") or type(error).__name__ == _HELP:
            raise
        _raise(error, ctx)


def _raise(error: Any, ctx: Any) -> NoReturn:
    """Raise UsageError for one of typer's."""
    wrong = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
    message = f"no such option: {wrong}" if wrong else _lower(error.format_message())
    raise UsageError(message, hint=_hint(error, wrong, ctx)) from None


def _lower(message: str) -> str:
    """Return a sentence of typer's as ours begin and end."""
    if extra := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)\.?", message):
        return f"unexpected words: {extra[1]}"
    text = message.strip().removesuffix(".").replace("int range", "integer")
    return f"{text[:1].lower()}{text[1:]}"


def _hint(error: Any, wrong: str, ctx: Any) -> str:
    """Return what works: the option that was meant, what an option takes, or how it is called."""
    called = " ".join(["ckptool", *([ctx.info_name] if ctx.parent else [])])
    if wrong:
        meant = _option_meant(wrong, ctx)
        return f"did you mean {meant}?" if meant else f"`{called} --help` lists the options"
    name = getattr(error, "option_name", None)
    option = getattr(error, "param", None) or _option(name, ctx)
    if option is not None and option.opts[0].startswith("-"):
        takes = f" {option.metavar}" if option.metavar else ""
        return f"{option.opts[0]}{takes}: {option.help}"
    words = [piece.strip("{}") for piece in ctx.command.collect_usage_pieces(ctx)]
    return " ".join([called, *words])


def _option(flag: str | None, ctx: Any) -> Any:
    """Return the option of a command with this flag, None without one."""
    return next((each for each in ctx.command.params if flag in each.opts), None)


def _option_meant(wrong: str, ctx: Any) -> str | None:
    """Return the flag that a former or misspelled one stands for, None if there is none."""
    params = ctx.command.params
    flags = [flag for each in params for flag in (*each.opts, *each.secondary_opts)]
    renamed = RENAMED.get(wrong, "")
    if renamed.partition(" ")[0] in flags:
        return renamed
    return next(iter(get_close_matches(wrong, flags, n=1, cutoff=0.75)), None)
