"""``ckptool convert``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.parameters import AsJson, Debug, Quiet, SourcePath, parse_place
from ckptool.commands.options.target import ConvertOptions


def convert(
    source: SourcePath,
    target: Annotated[
        str, typer.Argument(metavar="DST", help="Where to write it: a path or a URL.")
    ],
    *,
    options: ConvertOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint in another format, bit for bit.

    Everything is kept unless an option excludes it; what the target cannot hold goes into a side
    file or is named in a note. The target appears complete or not at all.
    """
    from ckptool.commands.convert import prepare
    from ckptool.render.messages import print_json, progress, show_notes, show_obstacle

    dry_run = options.transfer.dry_run
    prepared = prepare(parse_place(source, "SRC"), parse_place(target, "DST"), options)
    if not quiet:
        show_notes(prepared.report.notes)
        if dry_run:
            show_obstacle(prepared.transfer.obstacle())
    report = prepared.report
    if not dry_run:
        with progress(prepared.nbytes, quiet=quiet) as advance:
            report = prepared.run(advance)
    if as_json or dry_run or not quiet:
        from ckptool.render.convert import convert_json, show_convert

        if not quiet:
            show_notes(report.notes[len(prepared.report.notes) :])
        if as_json:
            print_json(convert_json(report, dry_run=dry_run))
        else:
            show_convert(report, dry_run=dry_run)
