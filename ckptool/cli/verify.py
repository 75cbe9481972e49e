"""``ckptool verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ckptool.cli.options import AsJson, Debug, SourcePath
from ckptool.cli.verify_modes import (
    Answer,
    ReportOutput,
    answer_of,
    run_against,
    run_proving,
    run_salvage,
    run_steps,
    run_writing,
)
from ckptool.commands.options.source import RewriteOptions
from ckptool.commands.options.verify import CompareOptions, ManifestOptions, VerifyOptions
from ckptool.core.options import OptionGroup, changed
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.verify import Started
    from ckptool.storage.url import Location

AGAINST = "Compare with another checkpoint"
REWRITING = "Compare SRC as `ckptool convert` rewrites it (with --against or a manifest)"
MANIFEST = "Manifests"
RUN = "Runs (folders of steps)"


def verify(
    source: SourcePath = ".",
    *,
    options: VerifyOptions,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="OTHER",
            rich_help_panel=AGAINST,
            help="Compare with this checkpoint, of any format, bit by bit.",
        ),
    ] = None,
    comparison: Annotated[CompareOptions, OptionGroup(panel=AGAINST)],
    rewrite: Annotated[RewriteOptions, OptionGroup(panel=REWRITING)],
    manifest: Annotated[ManifestOptions, OptionGroup(panel=MANIFEST)],
    latest_good: Annotated[
        bool,
        typer.Option(
            "--latest-good",
            rich_help_panel=RUN,
            help="Print the path of the newest step without errors, and nothing else, on stdout.",
        ),
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", rich_help_panel=RUN, help="Verify every step; show a table.")
    ] = False,
    salvage: Annotated[
        str | None,
        typer.Option(
            "--salvage",
            metavar="DST",
            rich_help_panel="Salvage a damaged checkpoint",
            help="Write what is intact to DST (a DCP folder, or a .safetensors or .pt file), and"
            " next to it a list of what is lost.",
        ),
    ] = None,
    codes: Annotated[
        bool, typer.Option("--codes", help="List the finding codes and exit.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report.")
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing; see the exit code.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Check that a checkpoint is complete, unchanged and safe, from its own files alone.

    Reads everything once. Exits 0 if no errors are found, 1 if there are any, 3 if there is no
    checkpoint. Other questions, one at a time: is it equal to OTHER, does it match a manifest,
    which step of a run is the newest good one, and what is left of a damaged one. With the options
    that `ckptool convert SRC DST` took, `--against DST` proves that DST is what it should be.
    If GITHUB_ACTIONS is true, findings are annotations too (on stderr with --json).
    """
    output = ReportOutput(junit, as_json, quiet)
    if codes:
        output.show_codes()
        return
    questions = (against, manifest.write_manifest, manifest.manifest, latest_good or every, salvage)
    _require_possible(questions, options, comparison, rewrite)
    from ckptool.cli.options import parse_place
    from ckptool.render.progress import started_progress
    from ckptool.storage.url import location

    place = parse_place(source, "SRC")
    if salvage is not None:
        overwrite = manifest.overwrite
        _end(run_salvage(place, location(salvage), options, output, overwrite=overwrite))
    if latest_good or every:
        _end(run_steps(place, options, output, every=every))
    with started_progress(quiet=quiet) as started:
        if against is not None:
            answer = run_against(place, location(against), comparison, rewrite, options, started)
        elif manifest.write_manifest is not None:
            target, overwrite = manifest.write_manifest, manifest.overwrite
            answer = run_writing(place, target, rewrite, options, started, overwrite=overwrite)
        elif manifest.manifest is not None:
            answer = run_proving(place, manifest.manifest, rewrite, options, started)
        else:
            answer = _verified(place, options, started)
    output.show(answer, strict=options.strict)
    _end(answer.report.ok)


def _require_possible(
    questions: tuple[object, ...],
    options: VerifyOptions,
    comparison: CompareOptions,
    rewrite: RewriteOptions,
) -> None:
    """Raise UsageError for questions and options that do not go together."""
    if sum(each not in (None, False) for each in questions) > 1:
        raise UsageError(
            "--against, --write-manifest, --manifest, --latest-good or --all, and --salvage:"
            " one at a time"
        )
    against, write_manifest, manifest, *_ = questions
    if against is not None and (options.quick or options.sample < 1):
        raise UsageError("--against compares every byte: not with --quick or --sample")
    if against is None and (flags := changed(comparison)):
        raise UsageError(f"{flags[0]} says what to compare: it needs --against OTHER")
    if (against, write_manifest, manifest) == (None, None, None) and (flags := changed(rewrite)):
        needs = "it needs --against OTHER, --manifest or --write-manifest"
        raise UsageError(f"{flags[0]} says what to compare: {needs}")


def _verified(place: Location, options: VerifyOptions, started: Started) -> Answer:
    from ckptool.commands.verify.verify import verify as run_verify

    return answer_of(run_verify(place, options, started))


def _end(answer: bool) -> NoReturn:
    raise typer.Exit(0 if answer else 1)
