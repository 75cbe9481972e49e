"""``ckptool verify --write-manifest`` and ``--manifest``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.verify_told import Told, told_of

if TYPE_CHECKING:
    from ckptool.commands.rewriting import RewriteOptions
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


def run_writing(
    source: Location,
    target: Location,
    rewriting: RewriteOptions,
    options: VerifyOptions,
    started: Started,
    *,
    overwrite: bool,
) -> Told:
    """Write a manifest of what is sound."""
    from ckptool.commands.verify.proving import ProvingOptions, write

    return told_of(write(source, ProvingOptions(target, overwrite, options, rewriting), started))


def run_proving(
    source: Location,
    manifest: Location,
    rewriting: RewriteOptions,
    options: VerifyOptions,
    started: Started,
) -> Told:
    """Prove by a manifest; every byte is read for the digests in any case."""
    from dataclasses import replace

    from ckptool.commands.verify.proving import ProvingOptions, prove

    if options.sample == 1 and not options.finite:
        options = replace(options, quick=True)
    asked = ProvingOptions(manifest, verify=options, rewrite=rewriting)
    return told_of(prove(source, asked, started))
