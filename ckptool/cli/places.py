"""Paths and URLs as the command line has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.engine.remote_path import Location


def parse_place(text: str, argument: str) -> Location:
    """The path or URL of an argument; UsageError where it is empty, as an unset variable is."""
    from ckptool.engine.remote_path import location

    if not text:
        raise UsageError(f"{argument}: an empty path")
    return location(text)
