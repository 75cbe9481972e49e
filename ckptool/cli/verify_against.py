"""``ckptool verify --against``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.verify_told import Told
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.verify import Started, VerifyOptions

_PANEL = "Against another checkpoint"

Against = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="OTHER",
        rich_help_panel=_PANEL,
        help="Compare with this checkpoint, of any format, bit by bit.",
    ),
]
Rtol = Annotated[
    float | None,
    typer.Option(
        "--rtol", min=0, rich_help_panel=_PANEL, help="Allowed difference, times OTHER's number."
    ),
]
Atol = Annotated[
    float | None, typer.Option("--atol", min=0, rich_help_panel=_PANEL, help="Allowed difference.")
]
Cast = Annotated[
    bool,
    typer.Option("--cast", rich_help_panel=_PANEL, help="Cast to OTHER's types, then compare."),
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="GLOB",
        rich_help_panel=_PANEL,
        help="Compare only what matches (repeatable).",
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        "--drop",
        metavar="GLOB",
        rich_help_panel=_PANEL,
        help="Leave out what matches (repeatable).",
    ),
]
ModelOnly = Annotated[
    bool,
    typer.Option("--model-only", rich_help_panel=_PANEL, help="Compare the models alone."),
]
StripPrefix = Annotated[
    str | None,
    typer.Option(
        "--strip-prefix",
        metavar="PREFIX",
        rich_help_panel=_PANEL,
        help="Take off the beginning of SRC's names.",
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="REGEX=REPLACEMENT",
        rich_help_panel=_PANEL,
        help="Rename SRC's, in order (repeatable).",
    ),
]


@dataclass(frozen=True, slots=True)
class AgainstArguments:
    """What the command line says of a comparison."""

    rtol: float | None
    atol: float | None
    cast: bool
    select: list[str] | None
    drop: list[str] | None
    model_only: bool
    strip_prefix: str | None
    rename: list[str] | None

    def require_none(self) -> None:
        """UsageError where something is said that makes sense only with --against."""
        for option, value in (
            ("--rtol", self.rtol is not None),
            ("--atol", self.atol is not None),
            ("--cast", self.cast),
            ("--select", self.select),
            ("--drop", self.drop),
            ("--model-only", self.model_only),
            ("--strip-prefix", self.strip_prefix),
            ("--rename", self.rename),
        ):
            if value:
                raise UsageError(f"{option} says what to compare: it needs --against OTHER")


def run_against(
    source: Path, other: Path, said: AgainstArguments, options: VerifyOptions, started: Started
) -> Told:
    """Compare, and say how to show what was found."""
    from ckptool.commands.verify.against import AgainstOptions, against
    from ckptool.commands.verify.compare import Tolerance
    from ckptool.render.verify_against import against_json, show_against

    tolerant = said.rtol is not None or said.atol is not None
    report = against(
        source,
        AgainstOptions(
            other,
            select=tuple(said.select or ()),
            drop=tuple(said.drop or ()),
            model_only=said.model_only,
            strip_prefix=said.strip_prefix,
            rename=tuple(said.rename or ()),
            tolerance=Tolerance(said.rtol or 0, said.atol or 0) if tolerant else None,
            cast=said.cast,
            verify=options,
        ),
        started,
    )
    return Told(report.verify, lambda: show_against(report), lambda: against_json(report))
