"""``ckptool verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptool.cli.arguments import AsJson, Debug, From, Quiet, SourcePath


def verify(
    source: SourcePath = Path(),
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", help="Leave out what has this code (repeatable)."),
    ] = None,
    from_format: From = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Prove that a checkpoint is whole, unchanged and safe, from its own files alone.

    Exits 0 where it is sound, 1 where it is not, 3 where there is no checkpoint.
    """
    from ckptool.commands.verify.verify import VerifyOptions
    from ckptool.commands.verify.verify import verify as run_verify
    from ckptool.render.messages import print_json
    from ckptool.render.verify import show_verify, verify_json

    report = run_verify(source, VerifyOptions(from_format, strict, tuple(ignore or ())))
    if as_json:
        print_json(verify_json(report))
    elif not quiet:
        show_verify(report)
    if not report.sound:
        raise typer.Exit(1)
