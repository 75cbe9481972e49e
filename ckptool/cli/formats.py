"""``ckptool formats``.

``ckptool maps``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.parameters import AsJson, complete_from
from ckptool.commands.options.choices import builtin_map_names


def formats(as_json: AsJson = False) -> None:
    """List the formats that are read and written."""
    from ckptool.render.formats import formats_json, show_formats
    from ckptool.render.messages import print_json

    if as_json:
        print_json(formats_json())
    else:
        show_formats()


def maps(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Print this map, a TOML file.",
            autocompletion=complete_from(builtin_map_names),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the key maps that --map takes by name, or print one."""
    from ckptool.render.formats import maps_json, show_map, show_maps
    from ckptool.render.messages import print_json

    if as_json:
        print_json(maps_json(name))
    elif name is None:
        show_maps()
    else:
        show_map(name)
