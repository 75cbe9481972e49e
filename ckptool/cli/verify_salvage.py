"""``ckptool verify --salvage``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ckptool.commands.verify.verify import VerifyOptions
    from ckptool.engine.remote_path import Location

SalvageTo = Annotated[
    str | None,
    typer.Option(
        "--salvage",
        metavar="DST",
        rich_help_panel="What is left of a damaged one",
        help="Write what is whole to DST (a DCP folder, or a .safetensors or .pt file), and beside"
        " it a list of what is lost.",
    ),
]


def run_salvage(
    source: Location,
    target: Location,
    options: VerifyOptions,
    *,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> bool:
    """Write what is whole, show what is lost, and return whether nothing is."""
    from ckptool.commands.transfer import TransferOptions
    from ckptool.commands.verify.salvage import SalvageOptions, plan_salvage, salvage_content
    from ckptool.engine.run import RunOptions
    from ckptool.render.messages import print_json
    from ckptool.render.progress import progress
    from ckptool.render.verify_salvage import show_salvage

    transfer = TransferOptions(overwrite, run=RunOptions(options.workers))
    asked = SalvageOptions(options.read, transfer)
    planned = plan_salvage(source, target, asked)
    with progress(planned.nbytes, quiet=quiet) as advance:
        report = planned.run(advance)
    if as_json:
        print_json(salvage_content(report))
    elif not quiet:
        show_salvage(report)
    return report.complete
