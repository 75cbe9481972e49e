"""``ckptool help``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckptool.cli.app import SUMMARIES, app
from ckptool.cli.completion import complete_from
from ckptool.commands.options.declaration import OptionGroup
from ckptool.commands.options.screen import Screen
from ckptool.core.text import did_you_mean
from ckptool.errors import UsageError


def _read_pages() -> dict[str, str]:
    """Return the pages of the documentation by topic."""
    from ckptool.render.help import read_pages

    return read_pages()


def help(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC | WORD]",
            help="Show this page, the help of this command, or the sections that have a word.",
            autocompletion=complete_from(lambda: [*_read_pages(), *SUMMARIES]),
        ),
    ] = None,
    *,
    screen: Annotated[Screen, OptionGroup(without=("json", "quiet", "debug"))],
) -> None:
    """List the pages of the documentation and the commands, show one, or search them."""
    from ckptool.render.help import find_word, show_page, show_places, show_topics

    pages, topic = _read_pages(), " ".join(words or [])
    if not topic:
        show_topics(pages, SUMMARIES)
    elif topic in pages:
        show_page(pages[topic])
        _note_command(topic)
    elif topic in SUMMARIES:
        app([topic, "--help"], prog_name=context.find_root().info_name)
    elif places := find_word(pages, topic):
        show_places(places)
    else:
        hint = did_you_mean(topic, [*pages, *SUMMARIES], "list them: ckptool help")
        raise UsageError(f"{topic}: no such topic or command", hint=hint)


def _note_command(topic: str) -> None:
    """Print on a terminal where the options are, if the page is named after a command."""
    if topic in SUMMARIES and sys.stdout.isatty():
        from ckptool.render.messages import show_notes

        show_notes([f"options of the command: ckptool {topic} --help"])
