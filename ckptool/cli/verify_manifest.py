"""``ckptool verify --write-manifest`` and ``--manifest``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.findings import VerifyReport
    from ckptool.commands.verify.verify import Started, VerifyOptions
    from ckptool.engine.remote_path import Location

_PANEL = "A manifest"

WriteManifest = Annotated[
    str | None,
    typer.Option(
        "--write-manifest",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Write the SHA-256 of every tensor, value and file, once all is sound.",
    ),
]
ByManifest = Annotated[
    str | None,
    typer.Option(
        "--manifest",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Prove by this manifest, whatever format it was written from.",
    ),
]


def run_proving(
    source: Location,
    *,
    written: Location | None,
    read: Location | None,
    overwrite: bool,
    options: VerifyOptions,
    started: Started,
) -> VerifyReport:
    """Write a manifest, or prove by one; every byte is read for the digests in any case."""
    from dataclasses import replace

    from ckptool.commands.verify.proving import ProvingOptions, prove, write

    if written is not None:
        return write(source, ProvingOptions(written, overwrite, options), started)
    if read is None:
        raise UsageError("--manifest needs a FILE")
    if options.sample == 1 and not options.finite:
        options = replace(options, quick=True)
    return prove(source, ProvingOptions(read, verify=options), started)
