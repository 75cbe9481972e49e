"""``ckptool reshard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptool.cli.options import (
    AsJson,
    Debug,
    DryRun,
    KeyMap,
    Quiet,
    Reading,
    SourcePath,
    Unstack,
    Writing,
)


def reshard(
    source: SourcePath = ".",
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DST", help="Where to write it; default: beside SRC, named after the mesh."
        ),
    ] = None,
    *,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", metavar="MESH", help="Write for this device mesh: 2x4, 8, or dp=2,tp=4."
        ),
    ] = None,
    shard: Annotated[
        list[str] | None,
        typer.Option(
            "--shard",
            metavar="GLOB=PLACEMENTS",
            help="Place what matches: Shard(0),Replicate() or colwise (repeatable, first wins).",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="FILE", help="Take the mesh and ordered rules of a TOML file."
        ),
    ] = None,
    tp_plan: Annotated[
        Path | None,
        typer.Option(
            "--tp-plan", metavar="FILE", help="Place by the transformers tp_plan of a config.json."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="NAME", help="Place all else by fsdp, hsdp or replicate."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Write dcp, rank-local, torch-checkpointing, dcp-safetensors, sharded-state or"
            " llama; default: the source's own kind.",
        ),
    ] = None,
    reading: Annotated[Reading, "How to read SRC"],
    unstack: Unstack = False,
    rank_state: Annotated[
        str,
        typer.Option(
            "--rank-state",
            metavar="WHAT",
            help="Do this with state that differs between ranks: stop, keep, drop, or the rank to"
            " take it from.",
        ),
    ] = "stop",
    key_map: Annotated[KeyMap, "Names and layout of another framework"],
    writing: Annotated[Writing, "How to write DST"],
    dry_run: DryRun = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read back and compare before it counts.")
    ] = True,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Load the result through torch, on as many ranks as the mesh has, and compare.",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint for a new device mesh, in one process or under torchrun.

    The first that applies places a tensor: --shard and --plan, --policy, the source's own
    placements, conventional mesh dim names, fsdp. Needs no GPU and no model.
    """
    from ckptool.cli.options import parse_place
    from ckptool.commands.reshard.reshard import ReshardOptions, prepare_reshard
    from ckptool.core.sharding.placement import parse_mesh, parse_rule
    from ckptool.engine.ranks import ranks
    from ckptool.render.progress import progress
    from ckptool.storage.url import Location

    options = ReshardOptions(
        mesh=None if mesh is None else parse_mesh(mesh),
        rules=tuple(map(parse_rule, shard or ())),
        policy=policy,
        plan_file=plan,
        tp_plan=tp_plan,
        to=to,
        read=reading.options(unstack=unstack),
        rank_state=rank_state,
        map=key_map.options(),
        transfer=writing.options(verify=verify),
    )

    def ends() -> tuple[Location, Location | None]:
        there = None if target is None else parse_place(target, "DST")
        return parse_place(source, "SRC"), there

    with ranks() as group:
        prepared = group.together(lambda: prepare_reshard(*ends(), options))
        quiet = quiet or group.rank > 0
        if not quiet:
            from ckptool.render.messages import show_notes, show_obstacle

            show_notes(prepared.report.notes)
            if dry_run:
                show_obstacle(prepared.transfer.obstacle())
        if check:
            from ckptool.commands.reshard.load_check import require_loadable

            group.together(lambda: require_loadable(prepared, group))
        report = prepared.report
        if not dry_run:
            with progress(prepared.nbytes, quiet=quiet) as advance:
                report = prepared.run(advance, group)
            if check:
                from ckptool.commands.reshard.load_check import check_loads

                check_loads(prepared, group)
        if group.rank == 0 and (as_json or dry_run or not quiet):
            from ckptool.render.messages import print_json, show_notes
            from ckptool.render.reshard import reshard_json, show_reshard

            if not quiet:
                show_notes(report.notes[len(prepared.report.notes) :])

            costs = prepared.costs() if dry_run else None
            if as_json:
                print_json(reshard_json(report, costs))
            else:
                show_reshard(report, costs)
