"""``ckptool prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.commands.options import parse_place
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.screen import Screen


def prune(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A folder with a run's steps; a path or a URL.")
    ],
    *,
    options: PruneOptions,
    screen: Screen,
) -> None:
    """Remove old steps of a run, after verifying those that are kept.

    Without --yes removes nothing and shows what it would do. Always keeps the Trainer's
    best step, those that `latest` or a symbolic link points to, and any unclear step. With --quick,
    the data of the newest good step is still read: NaN shows nowhere else. Exits 0 if all kept
    steps are good, 1 if a kept step is damaged or none is good.
    """
    from ckptool.commands.runs.prune.prune import prune as _prune
    from ckptool.render.data import print_json
    from ckptool.render.messages import show_step

    notify = (lambda text: None) if screen.quiet else show_step
    report = _prune(parse_place(run, "RUN"), options, notify)
    if screen.as_json:
        print_json(report.to_dict())
    elif not screen.quiet or not options.yes:
        from ckptool.render.prune import show_prune

        show_prune(report)
    if not report.ok:
        raise typer.Exit(1)
