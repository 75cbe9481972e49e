"""``ckptool reshard``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.parameters import AsJson, Debug, Quiet, SourcePath, parse_place
from ckptool.commands.options.target import ReshardOptions


def reshard(
    source: SourcePath = ".",
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DST", help="Where to write it; default: next to SRC, named after the mesh."
        ),
    ] = None,
    *,
    options: ReshardOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint for a new device mesh, in one process or under torchrun.

    The first that applies places a tensor: --shard and --plan, --policy, the source's own
    placements, conventional mesh dim names, fsdp. Needs no GPU and no model.
    """
    from ckptool.commands.reshard.reshard import PreparedReshard, prepare_reshard
    from ckptool.engine.ranks import join_ranks
    from ckptool.render.messages import print_json, progress, show_notes, show_obstacle

    dry_run = options.transfer.dry_run

    def prepare() -> PreparedReshard:
        place = None if target is None else parse_place(target, "DST")
        return prepare_reshard(parse_place(source, "SRC"), place, options)

    with join_ranks() as group:
        prepared = group.together(prepare)
        quiet = quiet or group.rank > 0
        if not quiet:
            show_notes(prepared.report.notes)
            if dry_run:
                show_obstacle(prepared.transfer.obstacle())
        if options.check:
            from ckptool.commands.reshard.load_check import check_loads, require_loadable

            group.together(lambda: require_loadable(prepared, group))
        report = prepared.report
        if not dry_run:
            with progress(prepared.nbytes, quiet=quiet) as advance:
                report = prepared.run(advance, group)
            if options.check:
                check_loads(prepared, group)
        if group.rank == 0 and (as_json or dry_run or not quiet):
            from ckptool.render.reshard import reshard_json, show_reshard

            if not quiet:
                show_notes(report.notes[len(prepared.report.notes) :])
            costs = prepared.costs() if dry_run else None
            if as_json:
                print_json(reshard_json(report, costs))
            else:
                show_reshard(report, costs)
