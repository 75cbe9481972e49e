"""``ckptool convert``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.options import (
    AsJson,
    Casting,
    Debug,
    DryRun,
    KeyMap,
    PerRank,
    Quiet,
    Reading,
    Selecting,
    SourcePath,
    Unstack,
    Writing,
    rewrite_options,
)


def convert(
    source: SourcePath,
    target: Annotated[
        str, typer.Argument(metavar="DST", help="Where to write it: a path or a URL.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Write safetensors (a .safetensors file, or else a Hugging Face folder),"
            " torch-save, dcp, dcp-safetensors, deepspeed-universal or megatron-torch_dist.",
        ),
    ],
    *,
    reading: Annotated[Reading, "How to read SRC"],
    unstack: Unstack = False,
    per_rank: PerRank = False,
    selecting: Annotated[Selecting, "What to keep, and how to call it"],
    key_map: Annotated[KeyMap, "Names and layout of another framework"],
    casting: Casting,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size", metavar="SIZE", help="Begin a new safetensors file beyond this."
        ),
    ] = "5GB",
    one_rank: Annotated[
        bool,
        typer.Option("--one-rank", help="Write whole tensors as rank 0, not the source's chunks."),
    ] = False,
    writing: Annotated[Writing, "How to write DST"],
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint in another format, bit for bit.

    Everything is kept unless an option leaves it out; what the target cannot hold goes into a side
    file or is named. The target appears whole or not at all.
    """
    from ckptool.cli.options import parse_place
    from ckptool.commands.convert import ConvertOptions, prepare
    from ckptool.core.units import parse_size
    from ckptool.render.progress import progress

    options = ConvertOptions(
        to=to,
        read=reading.options(per_rank=per_rank, unstack=unstack),
        rewrite=rewrite_options(selecting, key_map, casting),
        max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
        one_rank=one_rank,
        transfer=writing.options(),
    )
    prepared = prepare(parse_place(source, "SRC"), parse_place(target, "DST"), options)
    if not quiet:
        from ckptool.render.messages import show_notes, show_obstacle

        show_notes(prepared.report.notes)
        if dry_run:
            show_obstacle(prepared.transfer.obstacle())
    report = prepared.report
    if not dry_run:
        with progress(prepared.nbytes, quiet=quiet) as advance:
            report = prepared.run(advance)
    if as_json or dry_run or not quiet:
        from ckptool.render.convert import convert_json, show_convert
        from ckptool.render.messages import print_json, show_notes

        if not quiet:
            show_notes(report.notes[len(prepared.report.notes) :])
        if as_json:
            print_json(convert_json(report, dry_run=dry_run))
        else:
            show_convert(report, dry_run=dry_run)
