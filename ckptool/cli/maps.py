"""``ckptool maps``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptool.cli.arguments import AsJson


def maps(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this map, a TOML file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the key maps that --map of convert and reshard takes by name, or print one."""
    from ckptool.render.maps import maps_json, show_map, show_maps
    from ckptool.render.messages import print_json

    if as_json:
        print_json(maps_json(name))
    elif name is None:
        show_maps()
    else:
        show_map(name)
