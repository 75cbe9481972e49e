"""``ckptool convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptool.cli.arguments import (
    AsJson,
    Assets,
    Budget,
    Debug,
    Dims,
    DryRun,
    FlatParams,
    From,
    Fsync,
    Inverse,
    MapName,
    Overwrite,
    PerRank,
    Quiet,
    Resume,
    SourcePath,
    TpRules,
    Unstack,
    Workers,
)


def convert(
    source: SourcePath,
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where the result shall be.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="safetensors (a .safetensors file, or else a Hugging Face folder), torch-save,"
            " dcp, dcp-safetensors or deepspeed-universal.",
        ),
    ],
    from_format: From = None,
    tp_rule: TpRules = None,
    unstack: Unstack = False,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="GLOB", help="Keep only what matches (repeatable)."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="GLOB", help="Leave out what matches (repeatable)."),
    ] = None,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Keep the model, under its own names.")
    ] = False,
    strip_prefix: Annotated[
        str | None,
        typer.Option("--strip-prefix", metavar="PREFIX", help="Take off names' beginning."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename", metavar="REGEX=REPLACEMENT", help="Rename, in order (repeatable)."
        ),
    ] = None,
    key_map: MapName = None,
    dims: Dims = None,
    inverse: Inverse = None,
    hf_assets: Assets = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Cast floating tensors, e.g. bf16."),
    ] = None,
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize", help="Make numbers of FP8 blocks and MXFP4: bf16, or what --dtype says."
        ),
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of a safetensors shard.")
    ] = "5GB",
    one_rank: Annotated[
        bool,
        typer.Option("--one-rank", help="Write whole tensors as rank 0, not the source's chunks."),
    ] = False,
    per_rank: PerRank = False,
    flat_params: FlatParams = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    workers: Workers = None,
    budget: Budget = "1GiB",
    fsync: Fsync = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint in another format, bit for bit.

    Everything is kept unless an option leaves it out; what the target cannot hold goes into a side
    file or is named. The target appears whole or not at all.
    """
    from ckptool.cli.options import map_options, parse_dtype, parse_size, run_options
    from ckptool.commands.convert import ConvertOptions, prepare
    from ckptool.commands.transfer import TransferOptions
    from ckptool.core.tp_rules import parse_tp_rules
    from ckptool.render.progress import progress

    options = ConvertOptions(
        to=to,
        format_name=from_format,
        per_rank=per_rank,
        flat_params=flat_params,
        tp_rules=parse_tp_rules(tp_rule),
        unstack=unstack,
        select=tuple(select or ()),
        drop=tuple(drop or ()),
        model_only=model_only,
        strip_prefix=strip_prefix,
        rename=tuple(rename or ()),
        map=map_options(key_map, dims or (), hf_assets, inverse),
        dtype=parse_dtype(dtype) if dtype else None,
        dequantize=dequantize,
        max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
        one_rank=one_rank,
        transfer=TransferOptions(overwrite, resume, run=run_options(workers, budget, fsync)),
    )
    prepared = prepare(source, target, options)
    if not quiet:
        from ckptool.render.messages import show_notes

        show_notes(prepared.report.notes)
    if not dry_run:
        with progress(prepared.nbytes, quiet=quiet) as advance:
            prepared.run(advance)
    if as_json or dry_run or not quiet:
        from ckptool.render.convert import convert_json, show_convert
        from ckptool.render.messages import print_json

        if as_json:
            print_json(convert_json(prepared.report, dry_run=dry_run))
        else:
            show_convert(prepared.report, dry_run=dry_run)
