"""What ``ckptool verify`` can be asked: against another, by a manifest, of a run, to salvage.

What an answer of verify is, whatever was asked: a report, and how to show it.

``ckptool verify --against``.

``ckptool verify --write-manifest`` and ``--manifest``.

``ckptool verify --latest-good`` and ``--all``.

``ckptool verify --salvage``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptool.cli.options import AsJson, Casting, KeyMap, Selecting
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.rewrite import RewriteOptions
    from ckptool.commands.verify.compare.tensors import Tolerance
    from ckptool.commands.verify.report import VerifyReport
    from ckptool.commands.verify.verify import Started, VerifyOptions
    from ckptool.storage.url import Location


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
        from ckptool.render.messages import print_json
        from ckptool.render.verify.report import show_annotations, write_junit

        if self.junit is not None:
            write_junit(told.report, self.junit, strict=strict)
        if os.environ.get("GITHUB_ACTIONS") == "true" and not self.quiet:
            show_annotations(told.report, stderr=self.as_json)
        if self.as_json:
            print_json(told.content())
        elif not self.quiet:
            told.show()

    def tell_codes(self) -> None:
        """Say what the codes mean."""
        from ckptool.render.messages import print_json
        from ckptool.render.verify.report import codes_json, show_codes

        if self.as_json:
            print_json(codes_json())
        else:
            show_codes()


def told_of(report: VerifyReport) -> Told:
    """A report by itself, and how to show it."""
    from ckptool.render.verify.report import show_verify, verify_json

    return Told(report, lambda: show_verify(report), lambda: verify_json(report))


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
        from ckptool.commands.verify.compare.tensors import Tolerance

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
    from ckptool.commands.verify.compare.against import AgainstOptions, against
    from ckptool.render.verify.against import against_json, show_against

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


_PANEL = "A manifest"

WriteManifest = Annotated[
    str | None,
    typer.Option(
        "--write-manifest",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Write the SHA-256 of every tensor, value and file, once all is sound.",
    ),
]
ByManifest = Annotated[
    str | None,
    typer.Option(
        "--manifest",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Prove by this manifest, whatever format it was written from.",
    ),
]


def run_writing(
    source: Location,
    target: Location,
    rewriting: RewriteOptions,
    options: VerifyOptions,
    started: Started,
    *,
    overwrite: bool,
) -> Told:
    """Write a manifest of what is sound."""
    from ckptool.commands.verify.manifest.check import ProvingOptions, write

    return told_of(write(source, ProvingOptions(target, overwrite, options, rewriting), started))


def run_proving(
    source: Location,
    manifest: Location,
    rewriting: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Told:
    """Prove by a manifest; every byte is read for the digests in any case."""
    from dataclasses import replace

    from ckptool.commands.verify.manifest.check import ProvingOptions, prove

    if options.sample == 1 and not options.finite:
        options = replace(options, quick=True)
    asked = ProvingOptions(manifest, verify=options, rewrite=rewriting)
    return told_of(prove(source, asked, started))


_RUN_PANEL = "A run's folder"

LatestGood = Annotated[
    bool,
    typer.Option(
        "--latest-good",
        rich_help_panel=_RUN_PANEL,
        help="Print the path of the newest step that is whole, and nothing else, on stdout.",
    ),
]
All = Annotated[
    bool, typer.Option("--all", rich_help_panel=_RUN_PANEL, help="Verify every step; show a table.")
]


def run_steps(
    run: Location, options: VerifyOptions, *, every: bool, as_json: bool, quiet: bool
) -> bool:
    """Verify the steps of a run; whether the question that was asked is answered with yes.

    For every step: whether all are whole. For the latest good one: whether there is one.
    """
    from ckptool.commands.verify.run_folder import verify_run
    from ckptool.render.messages import print_json
    from ckptool.render.verify.run_folder import run_json, show_latest_good, show_steps

    report = verify_run(run, options, every=every)
    if as_json:
        print_json(run_json(report))
    elif every:
        show_steps(report)
    else:
        show_latest_good(report, quiet=quiet)
    return all(one.whole for one in report.verified) if every else report.latest_good is not None


SalvageTo = Annotated[
    str | None,
    typer.Option(
        "--salvage",
        metavar="DST",
        rich_help_panel="What is left of a damaged one",
        help="Write what is whole to DST (a DCP folder, or a .safetensors or .pt file), and beside"
        " it a list of what is lost.",
    ),
]


def run_salvage(
    source: Location,
    target: Location,
    options: VerifyOptions,
    *,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> bool:
    """Write what is whole, show what is lost, and return whether nothing is."""
    from ckptool.commands.transfer import TransferOptions
    from ckptool.commands.verify.salvage.salvage import (
        SalvageOptions,
        plan_salvage,
        salvage_content,
    )
    from ckptool.engine.write.run import RunOptions
    from ckptool.render.messages import print_json
    from ckptool.render.progress import progress
    from ckptool.render.verify.salvage import show_salvage

    transfer = TransferOptions(overwrite, run=RunOptions(options.workers))
    asked = SalvageOptions(options.read, transfer)
    planned = plan_salvage(source, target, asked)
    with progress(planned.nbytes, quiet=quiet) as advance:
        report = planned.run(advance)
    if as_json:
        print_json(salvage_content(report))
    elif not quiet:
        show_salvage(report)
    return report.complete
