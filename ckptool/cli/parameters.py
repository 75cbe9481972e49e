"""Options of the command line, derived from the commands' options classes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from shlex import quote
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from msgspec.structs import replace

from ckptool.cli.completion import complete_from, complete_names
from ckptool.cli.usage import RENAMED, show_all_help
from ckptool.commands.options.declaration import (
    RARE,
    Option,
    OptionGroup,
    OptionSet,
    build,
    options_of,
)
from ckptool.core.text import one_of
from ckptool.errors import CkptoolError, UsageError

Command = Callable[..., None]


def with_options(command: Command) -> tuple[Command, dict[str, int]]:
    """Return the command with an option for each field of its parameters that are options classes.

    ``Annotated[Options, OptionGroup(...)]`` puts them into a panel of the help, or omits some. With
    it comes how many words each option takes that takes several at a time.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, OptionGroup] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        kind, *how = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if isinstance(kind, type) and issubclass(kind, OptionSet):
            group = replace(how[0] if how else OptionGroup(), kind=kind)
            groups[parameter.name] = group
            parameters += map(_parameter, options_of(group))
        else:
            parameters.append(parameter.replace(annotation=hint))
    declared = {option.keyword: option for item in groups.values() for option in options_of(item)}
    if any(option.panel == RARE for option in declared.values()):
        parameters.append(_help_all())
    RENAMED.update({item.former: item.flag for item in declared.values() if item.former})

    @wraps(command)
    def run(**values: Any) -> None:
        from ckptool.storage.url import storage_options

        values.pop("help_all", None)
        _set_screen(values["color"], no_progress=values["no_progress"])
        written = {name: values.pop(name) for name in declared}
        given_values = {name: v for name, v in written.items() if v is not None and v != []}

        def parse(name: str) -> Any:
            option = declared[name]
            return option.parse(given_values[name], option.flag.partition("/")[0])

        opening = "storage_option"  # they apply to every URL among the other arguments
        with storage_options(parse(opening) if opening in given_values else {}):
            parsed = {name: parse(name) for name in given_values}
            sources = values.get("sources") or [None]  # of a merge, the first stands for all
            with _naming_places(values.get("source", sources[0]), values.get("target")):
                command(**values, **{name: build(group, parsed) for name, group in groups.items()})

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    words = {name: option.kind.words for name, option in declared.items() if option.kind.words > 1}
    return run, words


_PLACE = r"(?<=\s)(?:CKPT|SRC|DST)(?=[\s`])"
"""A word of a command that stands for a place, but no part of a path, as in ``CKPT+2026``."""


@contextmanager
def _naming_places(source: str | None, target: str | None) -> Iterator[None]:
    """Put the places of the command line into the commands of an error's hint, to be copied."""
    texts = {"CKPT": source, "SRC": source, "DST": target}
    places = {word: quote(place) for word, place in texts.items() if place}

    def named(command: re.Match[str]) -> str:
        return re.sub(_PLACE, lambda word: places.get(word[0], word[0]), command[0])

    try:
        yield
    except CkptoolError as error:
        error.hint = error.hint and re.sub(r"`ckptool [^`]*`", named, error.hint)
        raise


def _help_all() -> Parameter:
    """Return the option that shows the help with what is rarely needed."""
    shape = typer.Option(
        "--help-all",
        is_eager=True,
        callback=show_all_help,
        help="Show this message with all options, and exit.",
    )
    return Parameter(
        "help_all", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, shape]
    )


def _set_screen(color: str, *, no_progress: bool) -> None:
    """Set the screen options in the environment, so that child processes have them too."""
    if color not in _COLORS:
        raise UsageError(f"invalid --color {color!r}", hint="auto, always or never")
    if color != "auto":
        os.environ.pop(_COLORS["never" if color == "always" else "always"], None)
        os.environ[_COLORS[color]] = "1"
    if no_progress:
        os.environ["CKPTOOL_NO_PROGRESS"] = "1"


_COLORS = {"auto": "", "always": "FORCE_COLOR", "never": "NO_COLOR"}
"""Common environment variables, which rich obeys."""


def _parameter(option: Option) -> Parameter:
    """Return the option as a typer parameter."""
    default = option.shown if option.shown is not None else option.default
    if type(default) is not option.kind.line and default not in get_args(option.kind.line):
        default = None
    names = complete_names if option.completes_names else None
    shape = typer.Option(
        *filter(None, (option.flag, option.short)),
        metavar=option.metavar,
        help=option.help,
        min=option.minimum,
        max=option.maximum,
        rich_help_panel=option.panel,
        show_default=default is not None,
        autocompletion=complete_from(option.choices) if option.choices else names,
    )
    kind = option.kind.line if option.required else option.kind.line | None
    return Parameter(
        option.keyword,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if option.required else default,
        annotation=Annotated[kind, shape],
    )


SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint: its folder, a file inside it, or its parent folder; a path or a URL.",
    ),
]


def parse_form(form: str | None, forms: Sequence[str], *, as_json: bool) -> str | None:
    """Return what --format or --json ask for; UsageError if it is none of ``forms``."""
    if form is not None and form not in forms:
        raise UsageError(f"invalid --format {form!r}", hint=one_of(form, forms))
    if as_json and form not in (None, "json"):
        raise UsageError(f"--json is --format json: not with --format {form}")
    return "json" if as_json else form
