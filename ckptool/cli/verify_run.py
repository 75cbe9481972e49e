"""``ckptool verify --latest-good`` and ``--all``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ckptool.commands.verify.verify import VerifyOptions
    from ckptool.engine.remote_path import Location

_PANEL = "A run's folder"

LatestGood = Annotated[
    bool,
    typer.Option(
        "--latest-good",
        rich_help_panel=_PANEL,
        help="Print the path of the newest step that is whole, and nothing else, on stdout.",
    ),
]
All = Annotated[
    bool, typer.Option("--all", rich_help_panel=_PANEL, help="Verify every step; show a table.")
]


def run_steps(
    run: Location, options: VerifyOptions, *, every: bool, as_json: bool, quiet: bool
) -> bool:
    """Verify the steps of a run; whether the question that was asked is answered with yes.

    For every step: whether all are whole. For the latest good one: whether there is one.
    """
    from ckptool.commands.verify.run_folder import verify_run
    from ckptool.render.messages import print_json
    from ckptool.render.verify_run import run_json, show_latest_good, show_steps

    report = verify_run(run, options, every=every)
    if as_json:
        print_json(run_json(report))
    elif every:
        show_steps(report)
    else:
        show_latest_good(report, quiet=quiet)
    return all(one.whole for one in report.verified) if every else report.latest_good is not None
