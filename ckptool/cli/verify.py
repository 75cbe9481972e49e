"""``ckptool verify``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from ckptool.cli.page import Html, require_page
from ckptool.cli.parameters import RUN, AsJson, Debug, Silent, SourcePath, parse_place
from ckptool.cli.verify_output import Answer, Output
from ckptool.commands.options.declaration import OptionGroup, changed
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.verify import (
    CompareOptions,
    FollowOptions,
    LikeOptions,
    ManifestOptions,
    VerifyOptions,
    salvage_options,
)
from ckptool.errors import Several, UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.compare.against import AgainstReport
    from ckptool.commands.verify.verify import Started
    from ckptool.engine.ranks import Ranks
    from ckptool.storage.url import Location

AGAINST = "Compare with another checkpoint, or with the model that it should be"
REWRITING = "What of SRC to compare, as `ckptool convert` would write it"
BESIDE = "Manifests, and what is left of damage"


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
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            rich_help_panel=AGAINST,
            help="Compare with what this recipe of a merge computes of its sources.",
        ),
    ] = None,
    comparison: Annotated[CompareOptions, OptionGroup(panel=AGAINST)],
    like: Annotated[LikeOptions, OptionGroup(panel=AGAINST)],
    rewrite: Annotated[RewriteOptions, OptionGroup(panel=REWRITING)],
    manifest: Annotated[ManifestOptions, OptionGroup(panel=BESIDE)],
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
    following: Annotated[FollowOptions, OptionGroup(panel=RUN)],
    salvage: Annotated[
        str | None,
        typer.Option(
            "--salvage",
            metavar="DST",
            rich_help_panel=BESIDE,
            help="Write what is intact to DST (a DCP folder, or a .safetensors or .pt file), and"
            " next to it a list of what is lost.",
        ),
    ] = None,
    codes: Annotated[
        bool, typer.Option("--codes", help="List the finding codes and exit.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Print text, json (as --json does), junit, or github: text with annotations;"
            " default: github where GITHUB_ACTIONS is true, else text.",
        ),
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
    quiet: Silent = False,
    debug: Debug = False,
) -> None:
    """Check that a checkpoint is complete, unchanged and safe, from its own files alone.

    Reads everything once. Exits 0 if no errors are found, 1 if there are any, 3 if there is no
    checkpoint. Other questions, one at a time: is it equal to OTHER, is it a model like OTHER, does
    it match a manifest, which step of a run is the newest good one, and what is left of a damaged
    one. With the options
    of `ckptool convert SRC DST`, `--against DST` proves that DST is correct. If GITHUB_ACTIONS is
    true, json and junit print annotations on stderr.
    """
    output = Output.of(form, as_json=as_json, quiet=quiet)._replace(page=require_page(html))
    if codes:
        output.show_codes()
        return
    questions = _Questions(
        against,
        recipe,
        like.like,
        manifest.write_manifest,
        manifest.manifest,
        of_run=latest_good or every,
        follow=following.follow,
        salvage=salvage,
    )
    _require_possible(questions, options, comparison, rewrite)
    if like.like is None and (flags := changed(like)):
        hint = f"`ckptool verify SRC --like OTHER {flags[0]} ...`"
        raise UsageError(f"{flags[0]} says what to compare: it needs --like OTHER", hint=hint)
    from ckptool.render.progress import started_progress
    from ckptool.storage.url import location

    place = parse_place(source, "SRC")
    if salvage is not None:
        _salvage(place, location(salvage), options, output, overwrite=manifest.overwrite)
    if latest_good or every:
        _verify_steps(place, options, output, every=every)
    if following.follow or following.then is not None:
        _follow(place, following, options, output)
    try:
        with (
            _ranks(alone=any(questions) or options.quick) as ranks,
            started_progress(quiet=quiet or ranks.rank > 0) as started,
        ):
            if against is not None:
                answer = _compare(place, location(against), comparison, rewrite, options, started)
            elif recipe is not None:
                answer = _compare_merged(recipe, place, comparison, rewrite, options, started)
            elif like.like is not None:
                answer = _compare_model(place, like, comparison, rewrite, options, started)
            else:
                answer = _check(place, options, manifest, rewrite, started, ranks)
    except Several as error:
        if not any(questions):
            error.add_hint(f"`ckptool verify {source} --all` verifies each of them")
        raise
    if ranks.rank == 0:
        output.show(answer, strict=options.strict)
    _end(all(suite.report for suite in answer.suites))


def _ranks(*, alone: bool) -> AbstractContextManager[Ranks]:
    """Join the ranks of a torchrun job that share the reading of the data; else work alone."""
    from ckptool.engine.ranks import Ranks, join_ranks

    return nullcontext(Ranks()) if alone else join_ranks()


class _Questions(NamedTuple):
    """What is asked of a checkpoint besides whether it is sound, or of a run."""

    against: str | None
    recipe: Path | None
    like: Location | None
    write_manifest: Location | None
    manifest: Location | None
    of_run: bool
    follow: bool
    salvage: str | None


_FLAGS = (
    *("--against", "--recipe", "--like", "--write-manifest", "--manifest"),
    *("--latest-good or --all", "--follow", "--salvage"),
)
"""The options of the questions."""


def _require_possible(
    questions: _Questions,
    options: VerifyOptions,
    comparison: CompareOptions,
    rewrite: RewriteOptions,
) -> None:
    """Raise UsageError for questions and options that cannot be combined."""
    asked = [
        flag for flag, each in zip(_FLAGS, questions, strict=True) if each not in (None, False)
    ]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: one at a time", hint="one command for each")
    against, recipe, like, write_manifest, manifest, of_run, follow, _ = questions
    if options.allow_nonfinite and not (of_run or follow):
        raise UsageError(
            "--allow-nonfinite is for runs: it needs --latest-good, --all or --follow",
            hint="without --fail-nonfinite, NaN and infinite values are warnings",
        )
    other = "--against" if against is not None else "--recipe" if recipe is not None else None
    if other is not None and (options.quick or options.sample < 1):
        raise UsageError(
            f"{other} compares every byte: it cannot be combined with --quick or --sample",
            hint="leave them out; `ckptool diff` compares names, shapes and types only",
        )
    if options.part is not None and any(questions):
        raise UsageError(
            "--part checks a single checkpoint",
            hint="leave out --against, --recipe, --like, manifests, --salvage and what is of runs",
        )
    flags = [flag for flag in changed(comparison) if like is None or flag != "--other-format"]
    if other is None and flags:
        hint = f"`ckptool verify SRC --against OTHER {flags[0]} ...`"
        raise UsageError(f"{flags[0]} says what to compare: it needs --against OTHER", hint=hint)
    none = all(each is None for each in (other, like, write_manifest, manifest))
    if none and (flags := changed(rewrite)):
        needs = "it needs --against OTHER, --like OTHER, --manifest or --write-manifest"
        hint = f"such as `ckptool verify SRC --against OTHER {flags[0]}`"
        raise UsageError(f"{flags[0]} says what to compare: {needs}", hint=hint)


def _check(
    source: Location,
    options: VerifyOptions,
    manifest: ManifestOptions,
    rewrite: RewriteOptions,
    started: Started,
    ranks: Ranks,
) -> Answer:
    """Verify a checkpoint by itself or by a manifest, or write its manifest if it has no errors."""
    from ckptool.commands.verify.verify import verify as run_verify
    from ckptool.render.ci import Suite
    from ckptool.render.verify import show_verify

    if manifest.write_manifest is not None:
        from ckptool.commands.verify.manifest.build import build_manifest

        target, overwrite = manifest.write_manifest, manifest.overwrite
        report = build_manifest(source, target, options, rewrite, started, overwrite=overwrite)
    elif manifest.manifest is not None:
        from ckptool.commands.verify.manifest.check import check_manifest

        report = check_manifest(source, manifest.manifest, options, rewrite, started)
    else:
        report = run_verify(source, options, started, ranks)
    by_manifest = manifest.write_manifest or manifest.manifest
    suite = Suite(report, ("manifest",) if by_manifest else ())
    return Answer([suite], lambda: show_verify(report), report.to_dict)


def _compare(
    source: Location,
    other: Location,
    comparison: CompareOptions,
    rewrite: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Answer:
    from ckptool.commands.verify.compare.against import against

    return _compared(against(source, other, options, rewrite, comparison, started))


def _compare_merged(
    recipe: Path,
    merged: Location,
    comparison: CompareOptions,
    rewrite: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Answer:
    from ckptool.commands.merge.against import against_recipe

    return _compared(against_recipe(recipe, merged, options, rewrite, comparison, started))


def _compared(report: AgainstReport) -> Answer:
    from ckptool.render.ci import Suite
    from ckptool.render.verify import show_against

    suite = Suite(report.verify, ("comparison",))
    return Answer([suite], lambda: show_against(report), report.to_dict)


def _compare_model(
    source: Location,
    like: LikeOptions,
    comparison: CompareOptions,
    rewrite: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Answer:
    """Verify a checkpoint, and compare its model's names and shapes with another's."""
    from ckptool.commands.verify.compare.like import verify_like
    from ckptool.render.ci import Suite
    from ckptool.render.verify import show_verify

    report = verify_like(source, like, options, rewrite, started, comparison.other_format)
    suite = Suite(report, ("comparison",))
    return Answer([suite], lambda: show_verify(report), report.to_dict)


def _verify_steps(
    run: Location, options: VerifyOptions, output: Output, *, every: bool
) -> NoReturn:
    """Verify the steps of a run, and exit.

    For every step, exit 0 if none has errors; for the latest good one, if there is one.
    """
    from ckptool.commands.runs.assessment import verify_run
    from ckptool.render.ci import Suite
    from ckptool.render.verify import show_latest_good, show_steps

    report = verify_run(run, options, every=every)

    def show() -> None:
        if every:
            show_steps(report)
        else:
            show_latest_good(report, quiet=output.quiet)

    suites = [
        Suite(each, reasons=step.reasons if all(step.reports) else ())
        for step in report.steps
        for each in step.reports
    ]
    output.show(Answer(suites, show, report.to_dict, is_data=True), strict=options.strict)
    _end(report.ok)


def _follow(
    run: Location, following: FollowOptions, options: VerifyOptions, output: Output
) -> NoReturn:
    """Verify steps as they are finished, until a signal; exit 0 if nothing failed by then."""
    from ckptool.commands.verify.follow import follow, require_command, run_command
    from ckptool.render.verify import show_followed

    if not following.follow:
        raise UsageError("--then is for each step of a run: it needs --follow")
    if output.form == "junit" or output.page is not None:
        other = "--format junit" if output.page is None else "--html"
        raise UsageError(f"{other} is of a whole report, which --follow never has")
    then = None if following.then is None else require_command(following.then)
    ok = True
    try:
        for report in follow(run, options):
            code = run_command(then, report.path) if then and report.ok else None
            ok = ok and report.ok and not code
            if not output.quiet:
                show_followed(report, code, as_json=output.form == "json")
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C and SIGTERM: nothing else ends it
        _end(ok)
    _end(ok)


def _salvage(
    source: Location,
    target: Location,
    options: VerifyOptions,
    output: Output,
    *,
    overwrite: bool,
) -> NoReturn:
    """Write what is intact, show what is lost, and exit 0 if nothing is."""
    from ckptool.commands.verify.salvage.salvage import plan_salvage
    from ckptool.render.messages import print_json
    from ckptool.render.progress import progress
    from ckptool.render.verify import show_salvage

    if output.form == "junit":
        hint = "one command for each: a salvage tells what is lost, --format junit what is wrong"
        raise UsageError("--format junit cannot be combined with --salvage", hint=hint)
    if output.page is not None:
        raise UsageError("--html cannot be combined with --salvage, which writes a list of its own")
    planned = plan_salvage(source, target, salvage_options(options, overwrite=overwrite))
    with progress(planned.nbytes, quiet=output.quiet) as advance:
        report = planned.run(advance)
    if output.form == "json":
        print_json(report.to_dict())
    elif not output.quiet:
        show_salvage(report)
    _end(report.complete)


def _end(answer: bool) -> NoReturn:
    raise typer.Exit(0 if answer else 1)
