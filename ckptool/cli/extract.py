"""``ckptool extract``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.completion import complete_names
from ckptool.cli.parameters import SourcePath
from ckptool.commands.options import parse_place
from ckptool.commands.options.declaration import changed
from ckptool.commands.options.extract import ExtractOptions
from ckptool.commands.options.screen import Screen
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.storage.url import Location


def extract(
    source: SourcePath,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME... [FILE]",
            autocompletion=complete_names,
            help="A tensor, with numpy's syntax for a slice of it: 'w', 'w[0:4, :8]', 'w[..., -1]'."
            " Or a glob, or a part between dots that only one name has, or one of the model's."
            " Quote it for the shell. The last may be a .npy or .safetensors FILE to write.",
        ),
    ],
    *,
    options: ExtractOptions,
    screen: Screen,
) -> None:
    """Print tensors or slices of them, or save them to a file.

    Works with every format and reads only the bytes it needs. Without a FILE, prints up to 1,000
    elements in full and abbreviates larger tensors; --json prints up to 1,000,000.
    """
    from ckptool.commands.extract import SUFFIXES
    from ckptool.commands.verify.salvage.offer import offering_salvage

    place, target = parse_place(source, "SRC"), options.out
    if target is None and len(names) > 1 and names[-1].endswith(SUFFIXES):
        target = parse_place(names.pop(), "FILE")
    with offering_salvage(place, options.read):
        if target is None:
            _print(place, names, options, screen)
        else:
            _write(place, names, target, options, screen)


def _print(source: Location, names: Sequence[str], options: ExtractOptions, screen: Screen) -> None:
    """Print tensors or slices; UsageError for options of a file to write."""
    from ckptool.commands.extract import open_slices, read_values
    from ckptool.render.data import print_json
    from ckptool.render.extract import MOST_IN_JSON, show_values, values_json
    from ckptool.render.messages import show_notes

    if flags := [flag for flag in changed(options.transfer) if flag != "--workers"]:
        raise UsageError(
            f"{flags[0]} is for a file that is written: it needs --out FILE",
            hint="without a FILE, extract prints",
        )
    extraction, workers = open_slices(source, names, options), options.transfer.run.workers
    if not screen.quiet:
        show_notes(extraction.notes)
    if screen.as_json:
        print_json(values_json(extraction, read_values(extraction, MOST_IN_JSON, workers)))
    else:
        show_values(read_values(extraction, workers=workers))


def _write(
    source: Location,
    names: Sequence[str],
    target: Location,
    options: ExtractOptions,
    screen: Screen,
) -> None:
    """Write tensors or slices to a file."""
    from ckptool.commands.extract import prepare_extract
    from ckptool.render.data import print_json
    from ckptool.render.messages import show_notes
    from ckptool.render.progress import shown_progress

    planned = prepare_extract(source, names, target, options)
    if not screen.quiet:
        show_notes(planned.report.notes)
    with shown_progress(quiet=screen.quiet) as progress:
        report = planned.run(progress)
    if screen.as_json:
        print_json(report.to_dict())
    elif not screen.quiet:
        from ckptool.render.extract import show_extract

        show_extract(report)
