"""``ckptool diff``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.page import require_page, write_page
from ckptool.commands.options import parse_place
from ckptool.commands.options.diff import DiffOptions
from ckptool.commands.options.screen import SilentScreen
from ckptool.errors import Damaged


def diff(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A on the screen: a checkpoint of any format, as a path or a URL."
        ),
    ],
    other: Annotated[
        str,
        typer.Argument(
            metavar="OTHER",
            help="Another one, or a model: its config.json, or a folder with it and no checkpoint;"
            " B on the screen.",
        ),
    ],
    *,
    options: DiffOptions,
    screen: SilentScreen,
) -> None:
    """Show what differs between two checkpoints, or between one and the model it is for.

    Compares names, shapes and types of tensors, from metadata alone, and shows the option that
    would give SRC the names of OTHER. With --values compares content too: the largest change, by
    its norm, comes first. Of two runs, compares the newest step that both have. Exits 0 if nothing
    differs, 1 if anything does, 3 if one of the two cannot be read.
    """
    from ckptool.commands.verify.compare.diff import diff as run_diff
    from ckptool.render.data import print_json
    from ckptool.render.progress import shown_progress

    file = require_page(options.html)
    places = parse_place(source, "SRC"), parse_place(other, "OTHER")
    with shown_progress(quiet=screen.quiet) as progress:
        report = run_diff(*places, options, progress)
    write_page(file, report.to_dict, quiet=screen.quiet)
    if screen.as_json:
        print_json(report.to_dict())
    elif not screen.quiet:
        from ckptool.render.diff import show_diff

        show_diff(report)
    if not report.ok:
        raise typer.Exit(1 if report.readable else Damaged.exit_code)
