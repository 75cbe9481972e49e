"""``ckptool formats``."""

from __future__ import annotations

from ckptool.cli.arguments import AsJson


def formats(as_json: AsJson = False) -> None:
    """List the formats that are read and written."""
    from ckptool.render.formats import formats_json, show_formats
    from ckptool.render.messages import print_json

    if as_json:
        print_json(formats_json())
    else:
        show_formats()
