"""Answers of ``ckptool verify``: against another, by a manifest, of a run's steps, a salvage."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.commands.options.source import RewriteOptions
    from ckptool.commands.options.verify import CompareOptions, VerifyOptions
    from ckptool.commands.verify.report import VerifyReport
    from ckptool.commands.verify.verify import Started
    from ckptool.storage.url import Location


@dataclass(frozen=True, slots=True)
class Answer:
    """``show`` is for people, ``content`` makes the one JSON object."""

    report: VerifyReport
    show: Callable[[], None]
    content: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class ReportOutput:
    """Where a report goes, and how."""

    junit: Path | None
    as_json: bool
    quiet: bool

    def show(self, answer: Answer, *, strict: bool) -> None:
        """Write a report: as a file for CI, as annotations on GitHub, as JSON or in words."""
        from ckptool.render.messages import print_json
        from ckptool.render.verify.report import show_annotations, write_junit

        if self.junit is not None:
            write_junit(answer.report, self.junit, strict=strict)
        if os.environ.get("GITHUB_ACTIONS") == "true" and not self.quiet:
            show_annotations(answer.report, stderr=self.as_json)
        if self.as_json:
            print_json(answer.content())
        elif not self.quiet:
            answer.show()

    def show_codes(self) -> None:
        """Print what the finding codes mean."""
        from ckptool.render.messages import print_json
        from ckptool.render.verify.report import codes_json, show_codes

        if self.as_json:
            print_json(codes_json())
        else:
            show_codes()


def answer_of(report: VerifyReport) -> Answer:
    """A report by itself, and how to show it."""
    from ckptool.render.verify.report import show_verify, verify_json

    return Answer(report, lambda: show_verify(report), lambda: verify_json(report))


def run_against(
    source: Location,
    other: Location,
    comparison: CompareOptions,
    rewrite: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Answer:
    """Compare with another checkpoint."""
    from ckptool.commands.verify.compare.against import AgainstOptions, against
    from ckptool.render.verify.against import against_json, show_against

    report = against(source, AgainstOptions(other, rewrite, comparison, options), started)
    return Answer(report.verify, lambda: show_against(report), lambda: against_json(report))


def run_writing(
    source: Location,
    target: Location,
    rewrite: RewriteOptions,
    options: VerifyOptions,
    started: Started,
    *,
    overwrite: bool,
) -> Answer:
    """Write a manifest if no errors are found."""
    from ckptool.commands.verify.manifest.check import ProvingOptions, write

    return answer_of(write(source, ProvingOptions(target, overwrite, options, rewrite), started))


def run_proving(
    source: Location,
    manifest: Location,
    rewrite: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Answer:
    """Prove by a manifest; every byte is read for the digests in any case."""
    from dataclasses import replace

    from ckptool.commands.verify.manifest.check import ProvingOptions, prove

    if options.sample == 1 and not options.fail_nonfinite:
        options = replace(options, quick=True)
    asked = ProvingOptions(manifest, verify=options, rewrite=rewrite)
    return answer_of(prove(source, asked, started))


def run_steps(run: Location, options: VerifyOptions, output: ReportOutput, *, every: bool) -> bool:
    """Verify the steps of a run; whether the question that was asked is answered with yes.

    For every step: whether all are whole. For the latest good one: whether there is one.
    """
    from ckptool.commands.verify.run_folder import verify_run
    from ckptool.render.messages import print_json
    from ckptool.render.verify.run_folder import run_json, show_latest_good, show_steps

    report = verify_run(run, options, every=every)
    if output.as_json:
        print_json(run_json(report))
    elif every:
        show_steps(report)
    else:
        show_latest_good(report, quiet=output.quiet)
    return all(one.ok for one in report.verified) if every else report.latest_good is not None


def run_salvage(
    source: Location,
    target: Location,
    options: VerifyOptions,
    output: ReportOutput,
    *,
    overwrite: bool,
) -> bool:
    """Write what is intact, show what is lost, and return whether nothing is."""
    from ckptool.commands.options.verify import salvage_options
    from ckptool.commands.verify.salvage.salvage import plan_salvage, salvage_content
    from ckptool.render.messages import print_json
    from ckptool.render.progress import progress
    from ckptool.render.verify.salvage import show_salvage

    planned = plan_salvage(source, target, salvage_options(options, overwrite=overwrite))
    with progress(planned.nbytes, quiet=output.quiet) as advance:
        report = planned.run(advance)
    if output.as_json:
        print_json(salvage_content(report))
    elif not output.quiet:
        show_salvage(report)
    return report.complete
