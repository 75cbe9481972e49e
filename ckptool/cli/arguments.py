"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
FlatParams = Annotated[
    Path | None,
    typer.Option(
        "--flat-params",
        metavar="FILE",
        help="JSON of the model's parameters and shapes, in order, for FSDP1's flat ones.",
    ),
]
TpRules = Annotated[
    list[str] | None,
    typer.Option(
        "--tp-rule",
        metavar="GLOB=RULE",
        help="How tensor-parallel ranks' parameters fit together, where the files do not say:"
        " replicate, column, row, gated, Shard(dim) (repeatable, first wins).",
    ),
]
Unstack = Annotated[
    bool, typer.Option("--unstack", help="One tensor a layer and expert, of stacked ones.")
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

MapName = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="NAME|FILE",
        help="Give tensors the names and layout of another framework: a built-in key map (`ckptool"
        " maps` lists them), a TOML file, or auto.",
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=SIZE", help="A named dim of the --map (repeatable)."),
]
Inverse = Annotated[
    bool | None,
    typer.Option(
        "--inverse/--no-inverse",
        help="Go from the --map's to side to its from side; default: as the names fit.",
        show_default=False,
    ),
]
Assets = Annotated[
    Path | None,
    typer.Option(
        "--hf-assets",
        metavar="FOLDER",
        help="Carry along its config.json and tokenizer files; the --map reads the dims there.",
    ),
]
