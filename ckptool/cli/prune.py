"""``ckptool prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.parameters import AsJson, Debug, Quiet, parse_place
from ckptool.commands.options.prune import PruneOptions


def prune(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A folder with a run's steps; a path or a URL.")
    ],
    *,
    options: PruneOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Remove old steps of a run, after verifying those that are kept.

    Without --yes removes nothing and shows what it would do. Always keeps the Trainer's
    best step, those that `latest` or a symbolic link points to, and any unclear step. Exits 0 if
    all kept steps are good, 1 if a kept step is damaged or none is good.
    """
    from ckptool.commands.runs.prune import prune as _prune
    from ckptool.render.messages import print_json, show_step
    from ckptool.render.prune import show_prune

    report = _prune(parse_place(run, "RUN"), options, (lambda text: None) if quiet else show_step)
    if as_json:
        print_json(report.to_dict())
    elif not quiet or not options.yes:
        show_prune(report)
    if not report.ok:
        raise typer.Exit(1)
