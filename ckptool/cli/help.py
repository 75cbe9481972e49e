"""``ckptool help``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckptool.cli.app import SUMMARIES, app
from ckptool.cli.completion import complete_from
from ckptool.core.text import did_you_mean
from ckptool.errors import UsageError


def _read_pages() -> dict[str, str]:
    """Return the pages of the documentation by topic."""
    from ckptool.render.help import read_pages

    return read_pages()


def help(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPIC]",
            help="Show this page, or the help of this command.",
            autocompletion=complete_from(lambda: [*_read_pages(), *SUMMARIES]),
        ),
    ] = None,
) -> None:
    """List the pages of the documentation and the commands, or show one."""
    from ckptool.render.help import show_page, show_topics

    pages = _read_pages()
    if topic is None:
        show_topics(pages, SUMMARIES)
    elif topic in pages:
        show_page(pages[topic])
        _note_command(topic)
    elif topic in SUMMARIES:
        app([topic, "--help"], prog_name=context.find_root().info_name)
    else:
        hint = did_you_mean(topic, [*pages, *SUMMARIES], "list them: ckptool help")
        raise UsageError(f"{topic}: no such topic or command", hint=hint)


def _note_command(topic: str) -> None:
    """Print on a terminal where the options are, if the page is named after a command."""
    if topic in SUMMARIES and sys.stdout.isatty():
        from ckptool.render.messages import show_notes

        show_notes([f"options of the command: ckptool {topic} --help"])
