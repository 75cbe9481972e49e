"""What a command shows, and where: the options that are about the screen, not the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckptool.commands.options.declaration import FLAG, SPEED, OptionSet, option


class Screen(OptionSet):
    """What is shown, and how. Only ``as_json`` and ``quiet`` are for the commands themselves."""

    as_json: bool = option("--json", FLAG, help="Print one JSON object on stdout.")
    quiet: bool = option(
        "--quiet", FLAG, short="-q", help="Print only errors and the output that was asked for."
    )
    debug: bool = option("--debug", FLAG, help="Show the traceback of an error.", panel=SPEED)
    color: str = option(
        "--color",
        default="auto",
        metavar="WHEN",
        help="Use colors: auto, always or never.",
        panel=SPEED,
    )
    no_progress: bool = option(
        "--no-progress",
        FLAG,
        help="Show no progress, neither a bar nor lines in a log.",
        panel=SPEED,
    )


class SilentScreen(Screen):
    """The screen of a command whose exit code is an answer, too."""

    quiet: bool = option("--quiet", FLAG, short="-q", help="Print nothing; see the exit code.")


HTML = option(
    "--html",
    metavar="FILE",
    help="Also write all of it as one HTML page, to open offline or to share.",
)


def form_option(forms: Callable[[], Iterable[str]] | None, help: str) -> Any:
    """Declare how the output is printed: as one of ``forms``."""
    return option("--format", metavar="FORMAT", choices=forms, help=help)
