"""The application: what every command hangs from."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ckptool import __version__
from ckptool.cli.bench import bench
from ckptool.cli.convert import convert
from ckptool.cli.formats import formats, maps
from ckptool.cli.inspect import inspect
from ckptool.cli.options import RenamingCommand, with_options
from ckptool.cli.reshard import reshard
from ckptool.cli.verify import verify

app = typer.Typer(
    name="ckptool",
    help="See, prove, convert and reshard distributed PyTorch checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckptool {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    plugins: Annotated[
        bool, typer.Option("--plugins", help="Load installed formats of others: they are code.")
    ] = False,
) -> None:
    """See, prove, convert and reshard distributed PyTorch checkpoints."""
    if plugins:
        os.environ["CKPTOOL_PLUGINS"] = "1"


for command in (inspect, convert, reshard, verify, bench, formats, maps):
    app.command(cls=RenamingCommand)(with_options(command))
