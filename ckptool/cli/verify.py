"""``ckptool verify``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.arguments import AsJson, Debug, Overwrite, PerRank, SourcePath, Workers
from ckptool.cli.groups import Reading, Selecting
from ckptool.cli.verify_against import (
    PANEL,
    Against,
    Comparing,
    require_against,
    run_against,
)
from ckptool.cli.verify_manifest import ByManifest, WriteManifest, run_proving
from ckptool.cli.verify_run import All, LatestGood, run_steps
from ckptool.cli.verify_salvage import SalvageTo, run_salvage
from ckptool.cli.verify_told import Told
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.findings import VerifyReport


def verify(
    source: SourcePath = ".",
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read metadata only, not the data.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="SHARE", help="Read a share of the data, such as 5%."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="What --sample chooses by.")] = 0,
    finite: Annotated[
        bool, typer.Option("--finite", help="NaN and infinite values are errors.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", help="Leave out what has this code (repeatable)."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report.")
    ] = None,
    codes: Annotated[bool, typer.Option("--codes", help="List the codes and end.")] = False,
    against: Against = None,
    comparing: Comparing,
    selecting: Annotated[Selecting, PANEL],
    write_manifest: WriteManifest = None,
    manifest: ByManifest = None,
    latest_good: LatestGood = False,
    every: All = False,
    salvage: SalvageTo = None,
    overwrite: Overwrite = False,
    reading: Reading,
    per_rank: PerRank = False,
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing: the exit code says it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Check that a checkpoint is whole, unchanged and safe, from its own files alone.

    Reads everything once. Exits 0 where it is sound, 1 where it is not, 3 where there is none.
    Other questions, one at a time: is it the same as OTHER, is it what a manifest says, which step
    of a run is the newest whole one, and what is left of a damaged one.
    Where GITHUB_ACTIONS is true, findings are annotations too (on stderr beside --json).
    """
    from ckptool.cli.places import parse_place
    from ckptool.commands.verify.verify import VerifyOptions
    from ckptool.core.amounts import parse_share
    from ckptool.engine.remote_path import location
    from ckptool.engine.run import RunOptions
    from ckptool.render import verify as render
    from ckptool.render.messages import print_json
    from ckptool.render.progress import started_progress

    if codes:
        if as_json:
            print_json(render.codes_json())
        else:
            render.show_codes()
        return
    _require_one_question(
        against is not None,
        write_manifest is not None,
        manifest is not None,
        latest_good or every,
        salvage is not None,
    )
    if against is None:
        require_against(comparing, selecting)
    elif quick or sample:
        raise UsageError("--against compares every byte: not with --quick or --sample")
    place = parse_place(source, "SRC")
    options = VerifyOptions(
        read=reading.options(per_rank=per_rank),
        quick=quick,
        sample=parse_share(sample, "--sample") if sample else 1.0,
        seed=seed,
        finite=finite,
        strict=strict,
        ignore=tuple(ignore or ()),
        workers=workers or RunOptions().workers,
    )
    if salvage is not None:
        whole = run_salvage(
            place, location(salvage), options, overwrite=overwrite, as_json=as_json, quiet=quiet
        )
        raise typer.Exit(0 if whole else 1)
    if latest_good or every:
        found = run_steps(place, options, every=every, as_json=as_json, quiet=quiet)
        raise typer.Exit(0 if found else 1)
    with started_progress(quiet=quiet) as started:
        if against is not None:
            told = run_against(place, location(against), comparing, selecting, options, started)
        elif write_manifest is not None or manifest is not None:
            told = _told(
                run_proving(
                    place,
                    written=location(write_manifest) if write_manifest else None,
                    read=location(manifest) if manifest else None,
                    overwrite=overwrite,
                    options=options,
                    started=started,
                )
            )
        else:
            from ckptool.commands.verify.verify import verify as run_verify

            told = _told(run_verify(place, options, started))
    if junit is not None:
        render.write_junit(told.report, junit, strict=strict)
    if os.environ.get("GITHUB_ACTIONS") == "true" and not quiet:
        render.show_annotations(told.report, stderr=as_json)
    if as_json:
        print_json(told.content())
    elif not quiet:
        told.show()
    if not told.report.sound:
        raise typer.Exit(1)


def _told(report: VerifyReport) -> Told:
    from ckptool.render import verify as render

    return Told(report, lambda: render.show_verify(report), lambda: render.verify_json(report))


def _require_one_question(*asked: bool) -> None:
    if sum(asked) > 1:
        raise UsageError(
            "--against, --write-manifest, --manifest, --latest-good or --all, and --salvage:"
            " one at a time"
        )
