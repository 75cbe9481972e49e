"""The command line: parse, call a command, show its report. Errors become exit codes here alone."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ckptool import __version__
from ckptool.errors import CannotDo, CkptoolError, Damaged, UsageError, damaged

app = typer.Typer(
    name="ckptool",
    help="See, prove, convert and reshard distributed PyTorch checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SourcePath = Annotated[
    Path,
    typer.Argument(
        metavar="SRC", help="A checkpoint: its folder, a file inside it, or its parent folder."
    ),
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="FORMAT", help="Read as this format instead of detecting it."),
]
PerRank = Annotated[
    bool,
    typer.Option("--per-rank", help="Keep plain tensors that differ between ranks, as NAME@rankR."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the target once all is written.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what an interrupted run left.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, max=256, help="Threads that move bytes.")
]
Budget = Annotated[str, typer.Option("--budget", metavar="SIZE", help="Memory for moving bytes.")]
Fsync = Annotated[bool, typer.Option("--fsync/--no-fsync", help="Wait until the disk has it all.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> NoReturn:
    """Run the command line and exit with the documented code.

    Catalogs hold millions of objects and no cycles: collecting garbage would only cost time.
    """
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.disable()
    try:
        app()
    except SystemExit as done:
        if done.code in _INTERRUPTED:
            from ckptool.render.messages import show_interrupted

            show_interrupted()
        raise
    except (CkptoolError, RecursionError, MemoryError) as error:
        if "--debug" in sys.argv:
            raise
        from ckptool.render.messages import show_error

        known = error if isinstance(error, CkptoolError) else _out_of_bounds(error)
        show_error(known)
        sys.exit(known.exit_code)
    sys.exit(0)


_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind as on Ctrl-C, so that what is written can be resumed."""
    sys.exit(128 + number)


def _out_of_bounds(error: BaseException) -> CkptoolError:
    if isinstance(error, RecursionError):
        return Damaged("the source is nested too deep to be read")
    return CannotDo("there is not enough memory for this", hint="a smaller --budget needs less")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckptool {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """See, prove, convert and reshard distributed PyTorch checkpoints."""


@app.command()
def inspect(
    source: SourcePath = Path(),
    tensors: Annotated[
        list[str] | None,
        typer.Option("--tensors", metavar="GLOB", help="List every matching tensor in full."),
    ] = None,
    map_name: Annotated[
        str | None,
        typer.Option("--map", metavar="NAME", help="Draw which rank and file holds which box."),
    ] = None,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Bytes a rank, and the imbalance.")
    ] = False,
    values: Annotated[bool, typer.Option("--values", help="Show the non-tensor values.")] = False,
    stats: Annotated[
        list[str] | None,
        typer.Option(
            "--stats", metavar="GLOB", help="Read tensors: min, max, mean, std, NaN, Inf."
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Keep the screen as .svg or .html."),
    ] = None,
    from_format: From = None,
    per_rank: PerRank = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds, from its metadata alone.

    Format, writer, step, device mesh and placements, tensors with repeated layers folded, and
    non-tensor values. No tensor byte is read, nothing is unpickled, torch is not needed.
    """
    from ckptool.commands.inspect import inspect as run_inspect
    from ckptool.render.inspect import inspect_json, show, show_stats, stats_json
    from ckptool.render.messages import print_json, show_notes
    from ckptool.render.text import console

    report = run_inspect(source, format_name=from_format, per_rank=per_rank)
    found = None
    if stats:
        from ckptool.commands.stats import stats as run_stats

        found = run_stats(report.opened, stats)
    if as_json:
        print_json(inspect_json(report) | (stats_json(found) if found is not None else {}))
    else:
        screen = console(record=export is not None)
        if found is not None:
            show_stats(found, screen)
        else:
            show(
                report, screen, tensors=tensors or (), ranks=ranks, values=values, map_name=map_name
            )
        if export is not None:
            from ckptool.render.export import write_export

            write_export(screen, export)
        show_notes(report.notes)
    if report.problems:
        raise damaged(list(report.problems), subject=str(report.path))


@app.command()
def convert(
    source: SourcePath,
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where the result shall be.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="safetensors (a .safetensors file, or else a Hugging Face folder), torch-save,"
            " dcp or dcp-safetensors.",
        ),
    ],
    from_format: From = None,
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
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Cast floating tensors, e.g. bf16."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of a safetensors shard.")
    ] = "5GB",
    one_rank: Annotated[
        bool,
        typer.Option("--one-rank", help="Write whole tensors as rank 0, not the source's chunks."),
    ] = False,
    per_rank: PerRank = False,
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
    from ckptool.commands.convert import ConvertOptions, prepare
    from ckptool.commands.transfer import TransferOptions
    from ckptool.options import parse_dtype, parse_size, run_options
    from ckptool.render.progress import progress

    options = ConvertOptions(
        to=to,
        format_name=from_format,
        per_rank=per_rank,
        select=tuple(select or ()),
        drop=tuple(drop or ()),
        model_only=model_only,
        strip_prefix=strip_prefix,
        rename=tuple(rename or ()),
        dtype=parse_dtype(dtype) if dtype else None,
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


@app.command()
def reshard(
    source: SourcePath = Path(),
    target: Annotated[
        Path | None,
        typer.Argument(metavar="DST", help="Default: beside SRC, named after the mesh."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="MESH", help="2x4, 8, or dp=2,tp=4.")
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
        typer.Option("--plan", metavar="FILE", help="TOML: a mesh and an ordered list of rules."),
    ] = None,
    tp_plan: Annotated[
        Path | None,
        typer.Option(
            "--tp-plan", metavar="FILE", help="A config.json with a transformers tp_plan."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help="fsdp, hsdp or replicate.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="dcp, rank-local, torch-checkpointing, dcp-safetensors or sharded-state;"
            " default: the source's own kind.",
        ),
    ] = None,
    from_format: From = None,
    rank_state: Annotated[
        str,
        typer.Option(
            "--rank-state",
            metavar="WHAT",
            help="State that differs between ranks: stop, keep, drop, or the rank to take it from.",
        ),
    ] = "stop",
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
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
    workers: Workers = None,
    budget: Budget = "1GiB",
    fsync: Fsync = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint for a new device mesh, in one process or under torchrun.

    The first that applies places a tensor: --shard and --plan, --policy, the source's own
    placements, conventional mesh dim names, fsdp. Needs no GPU and no model.
    """
    from ckptool.commands.reshard import ReshardOptions, prepare_reshard
    from ckptool.commands.transfer import TransferOptions
    from ckptool.core.placing import parse_mesh, parse_rule
    from ckptool.engine.ranks import ranks
    from ckptool.options import run_options
    from ckptool.render.messages import print_json, show_notes
    from ckptool.render.progress import progress
    from ckptool.render.reshard import reshard_json, show_reshard

    options = ReshardOptions(
        mesh=parse_mesh(mesh) if mesh else None,
        rules=tuple(map(parse_rule, shard or ())),
        policy=policy,
        plan_file=plan,
        tp_plan=tp_plan,
        to=to,
        format_name=from_format,
        rank_state=rank_state,
        transfer=TransferOptions(overwrite, resume, verify, run_options(workers, budget, fsync)),
    )
    with ranks() as group:
        prepared = group.together(lambda: prepare_reshard(source, target, options))
        quiet = quiet or group.rank > 0
        if not quiet:
            show_notes(prepared.report.notes)
        if check:
            from ckptool.commands.check import require_loadable

            group.together(lambda: require_loadable(prepared, group))
        if not dry_run:
            with progress(prepared.nbytes, quiet=quiet) as advance:
                prepared.run(advance, group)
            if check:
                from ckptool.commands.check import check_loads

                check_loads(prepared, group)
        if group.rank:
            return
        costs = prepared.load_costs() if dry_run else None
        if as_json:
            print_json(reshard_json(prepared.report, costs))
        elif not quiet or dry_run:
            show_reshard(prepared.report, costs)


@app.command()
def bench(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SRC]", help="What to measure with; default: one torch writes."),
    ] = None,
    transfer: Annotated[
        bool,
        typer.Option("--transfer", help="Measure whole commands against cp and torch's own tools."),
    ] = False,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Of the generated checkpoint.")
    ] = "1.7GB",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds, interleaved.")] = 5,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to work; all is removed at the end.")
    ] = Path(),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure ckptool on this machine, interleaved with its peers, as ratios with memory."""
    from ckptool.commands.transfer_bench import transfer_bench
    from ckptool.options import parse_size
    from ckptool.render.messages import print_json, show_step
    from ckptool.render.transfer_bench import show_transfer_bench, transfer_bench_json

    if not transfer:
        raise UsageError("nothing to measure", hint="--transfer measures convert and reshard")
    report = transfer_bench(source, parse_size(size, "--size"), out, repeat, progress=show_step)
    if as_json:
        print_json(transfer_bench_json(report))
    else:
        show_transfer_bench(report)


@app.command()
def formats(as_json: AsJson = False) -> None:
    """List the formats that are read and written."""
    from ckptool.render.formats import formats_json, show_formats
    from ckptool.render.messages import print_json

    if as_json:
        print_json(formats_json())
    else:
        show_formats()
