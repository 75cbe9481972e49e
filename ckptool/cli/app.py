"""The application, and the group of its commands."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ckptool.cli.examples import ABOUT, GROUPS, epilog
from ckptool.cli.usage import Command, answering
from ckptool.core.text import did_you_mean
from ckptool.errors import UsageError
from ckptool.version import __version__

SUMMARIES = {
    "inspect": "Show what a checkpoint holds, from its metadata alone.",
    "diff": "Show what differs between two checkpoints, or between one and the model it is for.",
    "extract": "Print tensors or slices of them, or save them to a file.",
    "convert": "Write a checkpoint in another format, bit for bit.",
    "reshard": "Write a checkpoint for a new device mesh, in one process or under torchrun.",
    "merge": "Average, add, subtract and splice checkpoints, tile by tile.",
    "verify": "Check that a checkpoint is complete, unchanged and safe, from its own files alone.",
    "prune": "Remove old steps of a run, after verifying those that are kept.",
    "bench": "Measure ways to save on this machine: how long each blocks training, and when it is"
    " durable.",
    "formats": "List the formats that are read and written.",
    "maps": "List the key maps that --map takes by name, print one, or check one against a"
    " checkpoint.",
    "help": "List the pages of the documentation and the commands, show one, or search them.",
}
"""The commands, with the first lines of their docstrings."""
MODULES = {"convert": "transfer", "reshard": "transfer", "merge": "transfer", "maps": "formats"}
"""Commands whose modules have a different name."""

OTHERS_COMMANDS = {
    "inspect": "show info list ls print view stat head summary tree keys",
    "verify": "check validate test audit fsck doctor",
    "diff": "compare cmp",
    "convert": "export consolidate transform save copy cp",
    "reshard": "split shard redistribute repartition",
    "extract": "get cat dump read",
    "prune": "clean cleanup gc rm remove delete",
    "bench": "benchmark measure time",
}
"""What other tools call commands, after what it is here."""


class CommandGroup(TyperGroup):
    """The commands by name. Each is imported, with its options, when it runs."""

    def __init__(self, **settings: Any) -> None:
        commands = {
            name: TyperCommand(name, help=SUMMARIES[name], rich_help_panel=group)
            for group, names in GROUPS.items()
            for name in names
        }
        super().__init__(**settings | {"commands": commands})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that the first word names, ready to run, and the words after it.

        A path or URL in its place is inspected.
        """
        if args[0] not in self.commands and _is_place(args[0]):
            args = ["inspect", *args]
        if args[0] not in self.commands and not args[0].startswith("-"):
            hint = _command_meant(args[0], self.commands)
            raise UsageError(f"no such command, file or folder: {args[0]!r}", hint=hint)
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load_command(name), rest

    def commands_with(self, flag: str) -> list[str]:
        """Return the commands that have an option of this flag."""
        return [name for name in self.commands if _has(load_command(name), flag)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the command; UsageError if they are wrong."""
        if {"--install-completion", "--show-completion"} & {*args}:
            from ckptool.cli.completion import complete_at_once_in_zsh

            complete_at_once_in_zsh()
        with answering(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is named; UsageError if none is."""
        with answering(ctx):
            return super().invoke(ctx)


def _is_place(word: str) -> bool:
    """Return whether a word is a path or a URL, existing or not, and not a misspelled command."""
    return "/" in word or os.path.lexists(word)


def _command_meant(word: str, commands: Iterable[str]) -> str | None:
    """Return the hint with what a word that is no command stands for: a command, or a file here."""
    for ours, theirs in OTHERS_COMMANDS.items():
        if word in theirs.split():
            return f"did you mean {ours}?"
    files = (name for name in os.listdir() if not name.startswith("."))
    return did_you_mean(word, [*commands, *files], "`ckptool --help` lists the commands")


def _has(command: Any, flag: str) -> bool:
    """Return whether a command has an option of this flag."""
    return any(flag in (*param.opts, *param.secondary_opts) for param in command.params)


def load_command(name: str) -> Any:
    """Import a command, and return it with its options."""
    from ckptool.cli.parameters import with_options

    module = import_module(f"ckptool.cli.{MODULES.get(name, name)}")
    app = typer.Typer(add_completion=False)
    command = getattr(module, name)
    run, words = with_options(command)
    app.command(name, cls=Command, help=_help(name, command), epilog=epilog(name))(run)
    result: Any = get_command(app)
    for parameter in result.params:  # typer has no lists of several words
        parameter.nargs = words.get(parameter.name, parameter.nargs)
    return result


def _help(name: str, command: Any) -> str:
    """Return the docstring with one line per paragraph: the terminal's width wraps them.

    ``python -OO`` leaves its first line.
    """
    paragraphs = cleandoc(command.__doc__ or SUMMARIES[name]).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


app = typer.Typer(
    name="ckptool",
    cls=CommandGroup,
    help="See, verify, convert and reshard distributed PyTorch checkpoints.",
    epilog=ABOUT,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ckptool {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    plugins: Annotated[
        bool,
        typer.Option("--plugins", help="Load formats of other packages (runs their code)."),
    ] = False,
) -> None:
    """See, verify, convert and reshard distributed PyTorch checkpoints."""
    if plugins:
        os.environ["CKPTOOL_PLUGINS"] = "1"
