"""``ckptool bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptool.cli.arguments import AsJson, Debug
from ckptool.errors import UsageError


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
    ] = "2GB",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds, interleaved.")] = 5,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to work; all is removed at the end.")
    ] = Path(),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure ckptool on this machine, interleaved with its peers, as ratios with memory."""
    from ckptool.cli.options import parse_size
    from ckptool.commands.transfer_bench import transfer_bench
    from ckptool.render.messages import print_json, show_step
    from ckptool.render.transfer_bench import show_transfer_bench, transfer_bench_json

    if not transfer:
        raise UsageError("nothing to measure", hint="--transfer measures convert and reshard")
    report = transfer_bench(source, parse_size(size, "--size"), out, repeat, progress=show_step)
    if as_json:
        print_json(transfer_bench_json(report))
    else:
        show_transfer_bench(report)
