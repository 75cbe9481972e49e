"""How deep ``ckptool verify`` looks, and what fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ckptool.commands.read_options import ReadOptions
    from ckptool.commands.verify.verify import VerifyOptions


@dataclass(frozen=True)
class Looking:
    """How deep to look, and what counts."""

    quick: Annotated[bool, typer.Option("--quick", help="Read metadata only, not the data.")] = (
        False
    )
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="SHARE", help="Read a share of the data, such as 5%."),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="What --sample chooses by.")] = 0
    finite: Annotated[
        bool, typer.Option("--finite", help="NaN and infinite values are errors.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", help="Leave out what has this code (repeatable)."),
    ] = None

    def options(self, read: ReadOptions, workers: int | None) -> VerifyOptions:
        """What the command line says; UsageError where the share is none."""
        from ckptool.commands.verify.verify import VerifyOptions
        from ckptool.core.amounts import parse_share

        return VerifyOptions(
            read=read,
            quick=self.quick,
            sample=parse_share(self.sample, "--sample") if self.sample else 1.0,
            seed=self.seed,
            finite=self.finite,
            strict=self.strict,
            ignore=tuple(self.ignore or ()),
            workers=workers,
        )
