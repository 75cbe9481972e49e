"""``ckptool formats`` and ``ckptool maps``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.completion import complete_from
from ckptool.commands.options.choices import builtin_map_names
from ckptool.commands.options.declaration import OptionGroup
from ckptool.commands.options.rewrite import MapCheckOptions, MapOptions
from ckptool.commands.options.screen import Screen
from ckptool.errors import UsageError


def formats(*, screen: Annotated[Screen, OptionGroup(without=("quiet", "debug"))]) -> None:
    """List the formats that are read and written."""
    from ckptool.render.data import print_json
    from ckptool.render.formats import formats_json, show_formats

    if screen.as_json:
        print_json(formats_json())
    else:
        show_formats()


def maps(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Print this map, a TOML file; with --check, a TOML file of your own, too.",
            autocompletion=complete_from(builtin_map_names),
        ),
    ] = None,
    *,
    options: MapCheckOptions,
    screen: Annotated[Screen, OptionGroup(without=("quiet",))],
) -> None:
    """List the key maps that --map takes by name, print one, or check one against a checkpoint.

    With --check it exits 0 if the map can be applied to the checkpoint's model, 1 if it cannot.
    """
    from ckptool.render.data import print_json
    from ckptool.render.formats import maps_json, show_map, show_map_check, show_maps

    if options.check is not None:
        from ckptool.commands.keymap.check import check_map

        if name is None:
            raise UsageError("--check requires a map", hint="ckptool maps NAME --check CKPT")
        report = check_map(options.check, MapOptions(name))
        if screen.as_json:
            print_json(report.to_dict())
        else:
            show_map_check(report)
        if not report.ok:
            raise typer.Exit(1)
    elif screen.as_json:
        print_json(maps_json(name))
    elif name is None:
        show_maps()
    else:
        show_map(name)
