"""``ckptool verify --against``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.groups import Selecting
from ckptool.cli.verify_told import Told
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.compare import Tolerance
    from ckptool.commands.verify.verify import Started, VerifyOptions
    from ckptool.engine.remote_path import Location

PANEL = "Against another checkpoint"

Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="OTHER",
        rich_help_panel=PANEL,
        help="Compare with this checkpoint, of any format, bit by bit.",
    ),
]


@dataclass(frozen=True)
class Comparing:
    """When two values are the same, and how to read the other ones."""

    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", min=0, rich_help_panel=PANEL, help="Allowed difference, times OTHER's number."
        ),
    ] = None
    atol: Annotated[
        float | None,
        typer.Option("--atol", min=0, rich_help_panel=PANEL, help="Allowed difference."),
    ] = None
    cast: Annotated[
        bool,
        typer.Option("--cast", rich_help_panel=PANEL, help="Cast to OTHER's types, then compare."),
    ] = False

    against_from: Annotated[
        str | None,
        typer.Option(
            "--against-from",
            metavar="FORMAT",
            rich_help_panel=PANEL,
            help="Read OTHER as this format; --from is for SRC.",
        ),
    ] = None

    def tolerance(self) -> Tolerance | None:
        """What the command line says, None where bits are compared."""
        from ckptool.commands.verify.compare import Tolerance

        if self.rtol is None and self.atol is None:
            return None
        return Tolerance(self.rtol or 0, self.atol or 0)


def require_against(*groups: Comparing | Selecting) -> None:
    """UsageError where something is said that makes sense only with --against."""
    for group in groups:
        for field in fields(group):
            if getattr(group, field.name) not in (field.default, []):
                option = "--" + field.name.replace("_", "-")
                raise UsageError(f"{option} says what to compare: it needs --against OTHER")


def run_against(
    source: Location,
    other: Location,
    comparing: Comparing,
    selecting: Selecting,
    options: VerifyOptions,
    started: Started,
) -> Told:
    """Compare, and say how to show what was found."""
    from ckptool.commands.verify.against import AgainstOptions, against
    from ckptool.render.verify_against import against_json, show_against

    asked = AgainstOptions(
        other,
        selecting.options(),
        comparing.tolerance(),
        comparing.cast,
        options,
        comparing.against_from,
    )
    report = against(source, asked, started)
    return Told(report.verify, lambda: show_against(report), lambda: against_json(report))
