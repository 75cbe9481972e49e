"""``ckptool verify``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NoReturn

import typer

from ckptool.cli.page import require_page
from ckptool.cli.parameters import SourcePath
from ckptool.cli.verify_output import Answer, Output
from ckptool.commands.options import parse_place
from ckptool.commands.options.question import Question
from ckptool.commands.options.screen import SilentScreen
from ckptool.commands.options.verify import salvage_options
from ckptool.errors import Several, UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.compare.against import AgainstReport
    from ckptool.engine.progress import Progress
    from ckptool.engine.ranks import Ranks
    from ckptool.storage.url import Location


def verify(source: SourcePath = ".", *, options: Question, screen: SilentScreen) -> None:
    """Check that a checkpoint is complete, unchanged and safe, from its own files alone.

    Reads everything once. Exits 0 if no errors are found, 1 if there are any, 3 if there is no
    checkpoint. Other questions, one at a time: is it equal to OTHER, is it a model like OTHER, does
    it match a manifest, which step of a run is the newest good one, and what is left of a damaged
    one. With the options of `ckptool convert SRC DST`, `--against DST` proves that DST is correct.
    If GITHUB_ACTIONS is true, json and junit print annotations on stderr.
    """
    from ckptool.render.progress import shown_progress

    output = Output.of(options.form, as_json=screen.as_json, quiet=screen.quiet)
    output = output._replace(page=require_page(options.html))
    options.require_possible()
    if options.codes:
        output.show_codes()
        return
    place, check, is_plain = parse_place(source, "SRC"), options.check, not options.asked
    if options.salvage is not None:
        _salvage(place, options.salvage, options, output)
    if options.latest_good or options.every:
        _verify_steps(place, options, output)
    if options.following.follow or options.following.then is not None:
        _follow(place, options, output)
    try:
        with (
            _ranks(is_single=check.quick or not is_plain) as ranks,
            shown_progress(quiet=screen.quiet or ranks.rank > 0) as progress,
        ):
            answer = _answer(place, options, progress, ranks)
    except Several as error:
        if is_plain:
            error.add_hint(f"`ckptool verify {source} --all` verifies each of them")
        raise
    if ranks.rank == 0:
        output.show(answer, strict=check.strict)
    _end(all(suite.report for suite in answer.suites))


def _ranks(*, is_single: bool) -> AbstractContextManager[Ranks]:
    """Join the ranks of a torchrun job that share the reading of the data; else work alone."""
    from ckptool.engine.ranks import Ranks, join_ranks

    return nullcontext(Ranks()) if is_single else join_ranks()


def _answer(source: Location, question: Question, progress: Progress, ranks: Ranks) -> Answer:
    """Answer the question about one checkpoint."""
    from ckptool.commands.verify.answer import Suite, answer

    if question.against is not None:
        from ckptool.commands.verify.compare.against import against

        return _compare(against(source, question.against, question, progress), question)
    if question.recipe is not None:
        from ckptool.commands.merge.against import against_recipe

        compared = against_recipe(question.recipe, source, question, progress)
        return _compare(compared, question)
    report = answer(source, question, progress, ranks)

    def show() -> None:
        from ckptool.render.verify import show_verify

        show_verify(report)

    return Answer([Suite(report, question.checks)], show, report.to_dict)


def _compare(report: AgainstReport, question: Question) -> Answer:
    from ckptool.commands.verify.answer import Suite
    from ckptool.render.verify import show_against

    suite = Suite(report.verify, question.checks)
    return Answer([suite], lambda: show_against(report), report.to_dict)


def _verify_steps(run: Location, question: Question, output: Output) -> NoReturn:
    """Verify the steps of a run, and exit.

    For every step, exit 0 if none has errors; for the latest good one, if there is one.
    """
    from ckptool.commands.runs.verify import verify_run
    from ckptool.commands.verify.answer import Suite
    from ckptool.render.verify import show_latest_good, show_steps

    report = verify_run(run, question.check, every=question.every)

    def show() -> None:
        if question.every:
            show_steps(report)
        else:
            show_latest_good(report, quiet=output.quiet)

    suites = [
        Suite(part, reasons=step.reasons if all(step.reports) else ())
        for step in report.steps
        for part in step.reports
    ]
    output.show(Answer(suites, show, report.to_dict, is_data=True), strict=question.check.strict)
    _end(report.ok)


def _follow(run: Location, question: Question, output: Output) -> NoReturn:
    """Verify steps as they are finished, until a signal; exit 0 if nothing failed by then."""
    from ckptool.commands.verify.follow import follow, require_command, run_command
    from ckptool.render.verify import show_followed

    following = question.following
    if not following.follow:
        raise UsageError("--then is for each step of a run: it needs --follow")
    if output.form == "junit" or output.page is not None:
        other = "--format junit" if output.page is None else "--html"
        raise UsageError(f"{other} is of a whole report, which --follow never has")
    then = None if following.then is None else require_command(following.then)
    ok = True
    try:
        for report in follow(run, question.check):
            code = run_command(then, report.path) if then and report.ok else None
            ok = ok and report.ok and not code
            if not output.quiet:
                show_followed(report, code, as_json=output.form == "json")
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C and SIGTERM: nothing else ends it
        _end(ok)
    _end(ok)


def _salvage(source: Location, target: Location, question: Question, output: Output) -> NoReturn:
    """Write what is intact, show what is lost, and exit 0 if nothing is."""
    from ckptool.commands.verify.salvage.salvage import plan_salvage
    from ckptool.render.data import print_json
    from ckptool.render.progress import shown_progress
    from ckptool.render.verify import show_salvage

    if output.form == "junit":
        hint = "one command for each: a salvage tells what is lost, --format junit what is wrong"
        raise UsageError("--format junit cannot be combined with --salvage", hint=hint)
    if output.page is not None:
        raise UsageError("--html cannot be combined with --salvage, which writes a list of its own")
    how = salvage_options(question.check, overwrite=question.manifest.overwrite)
    planned = plan_salvage(source, target, how)
    with shown_progress(quiet=output.quiet) as progress:
        report = planned.run(progress)
    if output.form == "json":
        print_json(report.to_dict())
    elif not output.quiet:
        show_salvage(report)
    _end(report.complete)


def _end(answer: bool) -> NoReturn:
    raise typer.Exit(0 if answer else 1)
