"""What an answer of verify is, whatever was asked: a report, and how to show it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptool.cli.arguments import AsJson

if TYPE_CHECKING:
    from ckptool.commands.verify.findings import VerifyReport


@dataclass(frozen=True, slots=True)
class Told:
    """``show`` is for people, ``content`` makes the one JSON object."""

    report: VerifyReport
    show: Callable[[], None]
    content: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Telling:
    """To whom, and how."""

    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report.")
    ] = None
    as_json: AsJson = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing: the exit code says it.")
    ] = False

    def tell(self, told: Told, *, strict: bool) -> None:
        """Say it: as a file for CI, as annotations on GitHub, as JSON or in words."""
        from ckptool.render import verify as render
        from ckptool.render.messages import print_json

        if self.junit is not None:
            render.write_junit(told.report, self.junit, strict=strict)
        if os.environ.get("GITHUB_ACTIONS") == "true" and not self.quiet:
            render.show_annotations(told.report, stderr=self.as_json)
        if self.as_json:
            print_json(told.content())
        elif not self.quiet:
            told.show()

    def tell_codes(self) -> None:
        """Say what the codes mean."""
        from ckptool.render import verify as render
        from ckptool.render.messages import print_json

        if self.as_json:
            print_json(render.codes_json())
        else:
            render.show_codes()


def told_of(report: VerifyReport) -> Told:
    """A report by itself, and how to show it."""
    from ckptool.render import verify as render

    return Told(report, lambda: render.show_verify(report), lambda: render.verify_json(report))
