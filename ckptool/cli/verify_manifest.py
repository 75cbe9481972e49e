"""``ckptool verify --write-manifest`` and ``--manifest``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ckptool.commands.verify.findings import VerifyReport
    from ckptool.commands.verify.proving import ProvingOptions

_PANEL = "A manifest"

WriteManifest = Annotated[
    Path | None,
    typer.Option(
        "--write-manifest",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Write the SHA-256 of every tensor, value and file, once all is sound.",
    ),
]
ByManifest = Annotated[
    Path | None,
    typer.Option(
        "--manifest",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Prove by this manifest, whatever format it was written from.",
    ),
]


def run_proving(source: Path, options: ProvingOptions, *, quiet: bool) -> VerifyReport:
    """Write a manifest or prove by one."""
    from ckptool.commands.verify.proving import Proving
    from ckptool.render.progress import progress

    proving = Proving(source, options)
    with progress(proving.nbytes, quiet=quiet) as advance:
        return proving.run(advance)
