"""``ckptool verify --against``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.groups import Casting, KeyMap, Selecting
from ckptool.cli.verify_told import Told
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.rewriting import RewriteOptions
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
        typer.Option(
            "--cast",
            rich_help_panel=PANEL,
            help="Cast the model's weights to OTHER's types, then compare.",
        ),
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


def require_against(comparing: Comparing) -> None:
    """UsageError where something is said that makes sense only with --against."""
    _require_unsaid("it needs --against OTHER", comparing)


def require_other(*groups: Selecting | KeyMap | Casting) -> None:
    """UsageError where a rewriting is asked for and there is nothing to compare its result with."""
    _require_unsaid("it needs --against OTHER, --manifest or --write-manifest", *groups)


def _require_unsaid(needs: str, *groups: Comparing | Selecting | KeyMap | Casting) -> None:
    for group in groups:
        for field in fields(group):
            if getattr(group, field.name) not in (field.default, []):
                name = {"key_map": "map", "dims": "dim"}.get(field.name, field.name)
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} says what to compare: {needs}")


def run_against(
    source: Location,
    other: Location,
    comparing: Comparing,
    rewriting: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Told:
    """Compare, and say how to show what was found."""
    from ckptool.commands.verify.against import AgainstOptions, against
    from ckptool.render.verify_against import against_json, show_against

    asked = AgainstOptions(
        other,
        rewriting,
        comparing.tolerance(),
        comparing.cast,
        options,
        comparing.against_from,
    )
    report = against(source, asked, started)
    return Told(report.verify, lambda: show_against(report), lambda: against_json(report))
