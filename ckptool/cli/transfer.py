"""``ckptool convert``, ``reshard`` and ``merge``: plan, show notes, write, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ckptool.cli.parameters import SourcePath
from ckptool.commands.options import parse_place
from ckptool.commands.options.declaration import RUNS, OptionGroup, changed
from ckptool.commands.options.merge import MergeOptions
from ckptool.commands.options.screen import Screen
from ckptool.commands.options.steps import StepChoice
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.errors import NotFound, Several, Unsupported, UsageError

if TYPE_CHECKING:
    from ckptool.commands.transfer.report import TransferReport
    from ckptool.commands.transfer.transfer import Transfer
    from ckptool.engine.ranks import Ranks
    from ckptool.storage.url import Location

Report = TypeVar("Report", bound="TransferReport")


def convert(
    source: SourcePath,
    target: Annotated[
        str, typer.Argument(metavar="DST", help="Where to write it: a path or a URL.")
    ],
    *,
    options: ConvertOptions,
    steps: Annotated[StepChoice, OptionGroup(panel=RUNS)],
    screen: Screen,
) -> None:
    """Write a checkpoint in another format, bit for bit.

    Everything is kept unless an option excludes it; what the target cannot hold goes into a side
    file or is named in a note. The target appears complete or not at all. Several processes share
    the work under torchrun, or with --part and --finish.
    """
    from ckptool.commands.convert import ConvertReport, prepare
    from ckptool.commands.verify.salvage.offer import offering_salvage

    places = parse_place(source, "SRC"), parse_place(target, "DST")
    if changed(steps):
        options.transfer.require_one_way()
        _convert_steps(places, steps, options, screen)
        return

    def plan(ranks: Ranks) -> Transfer[ConvertReport]:
        try:
            return prepare(*places, options, ranks=ranks.size)
        except Several as error:
            error.add_hint("--all-steps converts each step")
            raise

    with offering_salvage(places[0], options.read):
        _run_transfer(plan, options.transfer, screen)


def _convert_steps(
    places: tuple[Location, Location],
    steps: StepChoice,
    options: ConvertOptions,
    screen: Screen,
) -> None:
    """Convert steps of a run and show what became of each; exit 1 if one fails or none is good."""
    import os

    from ckptool.commands.runs.convert import convert_run
    from ckptool.engine.ranks import read_launch
    from ckptool.render.data import print_json
    from ckptool.render.messages import show_notes, show_step
    from ckptool.render.progress import shown_progress

    if read_launch(os.environ) is not None:
        raise Unsupported(
            "under torchrun, the ranks share one checkpoint: convert steps in one process"
        )
    notify, noted = (show_step, show_notes) if not screen.quiet else (lambda text: None,) * 2
    with shown_progress(quiet=screen.quiet) as progress:
        report = convert_run(*places, steps, options, notify, progress, noted)
    if screen.as_json:
        print_json(report.to_dict())
    elif not screen.quiet or options.transfer.dry_run:
        from ckptool.render.convert import show_converted_steps

        show_converted_steps(report)
    if not report.ok:
        raise typer.Exit(1)


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
    screen: Screen,
) -> None:
    """Write a checkpoint for a new device mesh, in one process or under torchrun.

    Each tensor is placed by the first of these that applies: --shard and --plan, --policy, the
    source's own placements, conventional mesh dim names, fsdp. Needs no GPU and no model.
    """
    from ckptool.commands.reshard.reshard import Reshard, prepare_reshard
    from ckptool.commands.verify.salvage.offer import offering_salvage

    place = parse_place(source, "SRC")

    def plan(ranks: Ranks) -> Reshard:
        written = None if target is None else parse_place(target, "DST")
        return prepare_reshard(place, written, options, ranks=ranks.size)

    with offering_salvage(place, options.read):
        _run_transfer(plan, options.transfer, screen)


def merge(
    target: Annotated[
        str, typer.Argument(metavar="OUT", help="Where to write it: a path or a URL.")
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SRC]...", help="The checkpoints, in any format and sharding."),
    ] = None,
    *,
    options: MergeOptions,
    screen: Screen,
) -> None:
    """Average, add, subtract and splice checkpoints, tile by tile.

    Computes in 64 bits, rounds once, to the first SRC's type or what --dtype says, and proves the
    result. What is no floating tensor comes from the first SRC, and so do config and tokenizer.
    """
    from ckptool.commands.merge import MergeReport, prepare_merge

    def plan(ranks: Ranks) -> Transfer[MergeReport]:
        places = [parse_place(text, "SRC") for text in sources or ()]
        out = parse_place(target, "OUT")
        try:
            return prepare_merge(places, out, options)
        except (NotFound, UsageError) as error:
            hint = _target_first(out, places, options)
            raise error if hint is None else type(error)(error.message, hint=hint) from None

    _run_transfer(plan, options.convert.transfer, screen)


def _target_first(
    target: Location, sources: Sequence[Location], options: MergeOptions
) -> str | None:
    """Return the right words for a merge whose target was put last, as in ``cp``; else None.

    The place of its first word exists, that of its last one does not.
    """
    ways = {*changed(options.expression)}
    if not sources or not ways <= {"--average", "--sum", "--ema"}:
        return None
    if not target.exists() or sources[-1].exists():
        return None
    way, decay = min(ways, default="--average"), options.expression.ema
    way = way if decay is None else f"--ema {decay}"
    words = " ".join(quote(str(place)) for place in (target, *sources[:-1]))
    return f"the target comes first: `ckptool merge {quote(str(sources[-1]))} {way} {words}`"


def _run_transfer(
    plan: Callable[[Ranks], Transfer[Report]],
    how: TransferOptions,
    screen: Screen,
) -> None:
    """Plan a transfer on each rank, write it or not, and show its report on the first rank.

    What shows it is imported then: quiet commands start without rich.
    """
    from ckptool.engine.ranks import join_ranks

    how.require_one_way()
    with join_ranks() as ranks:
        with ranks.together():
            planned = plan(ranks)
        with _noting_what_stands() as stands:
            silent = screen.quiet or ranks.rank > 0
            report = _run(planned, ranks, stands, dry_run=how.dry_run, quiet=silent)
            if ranks.rank == 0 and (screen.as_json or how.dry_run or not screen.quiet):
                _show(report, as_json=screen.as_json)


def _show(report: Any, *, as_json: bool) -> None:
    """Show what was done or would be done; for a part, only its share."""
    if as_json:
        from ckptool.render.data import print_json

        print_json(report.to_dict())
        return
    from ckptool.render.convert import show_convert, show_merge, show_part

    if report.part is not None and report.part.done and not report.written:
        show_part(report, report.part)
    elif report.schema == "reshard":
        from ckptool.render.reshard import show_reshard

        show_reshard(report)
    else:
        (show_merge if report.schema == "merge" else show_convert)(report)


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
    from ckptool.render.messages import show_notes, show_obstacle
    from ckptool.render.progress import is_live, shown_progress

    if dry_run:
        if not quiet:
            _show_plan(planned, timed=ranks.size == 1)
            show_obstacle(planned.obstacle())
        planned.require_possible(ranks)
        return planned.with_costs()
    with shown_progress(quiet=quiet) as progress:
        stage = planned.open_stage(ranks)
        if not quiet:
            _show_plan(planned, timed=ranks.size == 1 and is_live(quiet=False) is not None)
        report = planned.run_on(stage, progress, ranks)
        stands.append(planned.standing)
    if not quiet:
        show_notes(report.notes[len(planned.report.notes) :])
    return report


def _show_plan(planned: Transfer[Report], *, timed: bool) -> None:
    """Show the notes of a plan and, if it is to be ``timed``, an estimate of how long it takes."""
    from ckptool.render.messages import show_notes
    from ckptool.render.progress import show_estimate

    show_notes(planned.report.notes)
    if timed:
        show_estimate(planned.estimate())
