"""``ckptool convert`` and ``ckptool reshard``: plan, show the plan's notes, write, and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ckptool.cli.parameters import AsJson, Debug, Quiet, SourcePath, parse_place
from ckptool.commands.options.target import ConvertOptions, ReshardOptions

if TYPE_CHECKING:
    from ckptool.commands.transfer.report import TransferReport
    from ckptool.commands.transfer.transfer import Transfer
    from ckptool.engine.ranks import Ranks

Report = TypeVar("Report", bound="TransferReport")


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
    file or is named in a note. The target appears complete or not at all. Several processes share
    the work under torchrun, or with --part and --finish.
    """
    from ckptool.commands.convert import prepare
    from ckptool.engine.ranks import join_ranks

    dry_run = options.transfer.dry_run
    options.transfer.require_one_way()
    with join_ranks() as ranks:
        places = parse_place(source, "SRC"), parse_place(target, "DST")
        planned = ranks.together(lambda: prepare(*places, options, ranks=ranks.size))
        with _noting_what_stands() as stands:
            report = _run(planned, ranks, stands, dry_run=dry_run, quiet=quiet or ranks.rank > 0)
            if ranks.rank == 0 and (as_json or dry_run or not quiet):
                from ckptool.render.convert import show_convert

                _show(report, show_convert, as_json=as_json)


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

    Each tensor is placed by the first of these that applies: --shard and --plan, --policy, the
    source's own placements, conventional mesh dim names, fsdp. Needs no GPU and no model.
    """
    from ckptool.commands.reshard.reshard import Reshard, prepare_reshard
    from ckptool.engine.ranks import join_ranks

    dry_run = options.transfer.dry_run
    options.transfer.require_one_way()

    def prepare(ranks: Ranks) -> Reshard:
        place = None if target is None else parse_place(target, "DST")
        return prepare_reshard(parse_place(source, "SRC"), place, options, ranks=ranks.size)

    with join_ranks() as ranks:
        planned = ranks.together(partial(prepare, ranks))
        with _noting_what_stands() as stands:
            report = _run(planned, ranks, stands, dry_run=dry_run, quiet=quiet or ranks.rank > 0)
            if ranks.rank == 0 and (as_json or dry_run or not quiet):
                from ckptool.render.reshard import show_reshard

                report = planned.with_costs() if dry_run else report
                _show(report, show_reshard, as_json=as_json)


def _show(report: Report, show: Callable[[Report], None], *, as_json: bool) -> None:
    """Show what was done or would be done; for a part, only its share."""
    from ckptool.render.convert import show_part
    from ckptool.render.messages import print_json

    if as_json:
        print_json(report.to_dict())
    elif report.part is not None and report.part.done and not report.written:
        show_part(report, report.part)
    else:
        show(report)


@contextmanager
def _noting_what_stands() -> Iterator[list[str]]:
    """Give a list, whose texts are noted on an interruption: what is written by then, and stays."""
    stands: list[str] = []
    try:
        yield stands
    except (KeyboardInterrupt, SystemExit) as error:
        for note in stands:
            error.add_note(note)
        raise


def _run(
    planned: Transfer[Report], ranks: Ranks, stands: list[str], *, dry_run: bool, quiet: bool
) -> Report:
    """Run the plan, or report why that would be refused now; show its notes and progress."""
    if quiet and not dry_run:
        report = planned.run(ranks=ranks)  # nothing is shown: rich is not loaded
        stands.append(planned.standing)
        return report
    from ckptool.render.messages import show_notes, show_obstacle
    from ckptool.render.progress import progress

    def begun() -> None:
        if not quiet:
            show_notes(planned.report.notes)

    if dry_run:
        begun()
        if not quiet:
            show_obstacle(planned.obstacle())
        planned.require_possible(ranks)
        return planned.report
    with progress(planned.nbytes, quiet=False) as advance:
        report = planned.run(advance, ranks, begun)
        stands.append(planned.standing)
    show_notes(report.notes[len(planned.report.notes) :])
    return report
