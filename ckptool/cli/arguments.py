"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint: its folder, a file inside it, or its parent folder; a path or a URL.",
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
Unstack = Annotated[
    bool, typer.Option("--unstack", help="Take stacked layers and experts apart: a tensor each.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the target once all is written.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        max=256,
        help="Use N threads, 256 at most; default: one a core, 8 at most, and 16 for a URL.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show no progress and no notes."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
