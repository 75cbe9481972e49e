"""The pages of the documentation: their list, and one of them on a terminal or in a pipe."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from operator import itemgetter
from shutil import which
from typing import NamedTuple

from rich.text import Text

from ckptool.core.text import plural
from ckptool.render.text import columns, console, emit

_WIDEST = 120
"""Columns of the pages: longer lines are hard to read."""
_FOR_DEVELOPERS = ("adding-a-format", "architecture", "benchmarks", "decisions")
_MOST_PLACES = 20
"""Sections that are listed for a word."""
_CANNOT_RUN = (126, 127)
"""Exit codes of a shell that cannot run or find a command."""


def read_pages() -> dict[str, str]:
    """Return the Markdown of every page by its topic, the stem of its file, in order."""
    files = sorted(resources.files("ckptool").joinpath("docs").iterdir(), key=str)
    pages = (file for file in files if file.name.endswith(".md"))
    return {file.name.removesuffix(".md"): file.read_text("utf-8") for file in pages}


def show_topics(pages: Mapping[str, str], commands: Mapping[str, str]) -> None:
    """List the topics with the first sentences of their pages, then commands with summaries."""
    screen = console()
    width = max(map(len, [*pages, *commands]))
    sentences = {topic: first_sentence(page) for topic, page in pages.items()}
    for heading, rows in (("topic", sentences), ("command", commands)):
        cells = [(f"{name:<{width}}", text) for name, text in rows.items()]
        emit(screen, [*columns(screen, cells, "ll", heads=(heading, "description")), Text()])
    screen.print("ckptool help TOPIC shows a page, ckptool COMMAND --help the options of a command")


class Place(NamedTuple):
    """A section that has a word: its page and heading, and the first sentence that has it."""

    topic: str
    heading: str
    sentence: str


def find_word(pages: Mapping[str, str], word: str) -> list[Place]:
    """Return the sections that have a word, or one that begins so.

    First come those that have it in their headings, last those of pages for developers.
    """
    letters = re.escape(word).replace(r"\ ", r"[\s-]+")
    pattern = re.compile(rf"(?i)(?<![a-z0-9]){letters}")
    places: list[tuple[bool, bool, Place]] = []
    for topic, page in pages.items():
        for section in re.split(r"(?m)^#+ ", page)[1:]:
            heading, _, text = section.partition("\n")
            in_heading = pattern.search(heading) is not None
            sentence = next(filter(pattern.search, _sentences(text)), None)
            if in_heading or sentence is not None:
                place = Place(topic, _plain(heading), sentence or "")
                places.append((topic in _FOR_DEVELOPERS, not in_heading, place))
    return [place for _, _, place in sorted(places, key=itemgetter(0, 1))]


def show_places(places: Sequence[Place]) -> None:
    """List sections of pages, each with the line that has the word."""
    screen = console()
    lines: list[Text] = []
    for place in places[:_MOST_PLACES]:
        lines.append(Text.assemble((place.topic, "bold"), f"  {place.heading}"))
        lines += [Text(f"    {place.sentence}")] if place.sentence else []
    if len(places) > _MOST_PLACES:
        lines.append(Text(f"and {plural(len(places) - _MOST_PLACES, 'more section')}"))
    emit(screen, [*lines, Text("ckptool help TOPIC shows a page")])


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown as text; a row of a table, or a line of code, is one."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*] |[|$ ]|\d+\. )", text):
        if paragraph.lstrip("\n").startswith("|"):
            cells = re.split(r"(?<!\\)\|", paragraph.strip().strip("|"))
            yield _plain("  ".join(cell.strip() for cell in cells))
        else:
            yield from re.split(r"(?<=[.:?]) (?=[A-Z`*-])", _plain(" ".join(paragraph.split())))


def _plain(text: str) -> str:
    """Return Markdown without its marks."""
    return re.sub(r"`|\*\*|^[-*] |\\(?=\|)", "", text)


def first_sentence(page: str) -> str:
    """Return the first sentence under the heading as plain text; the heading if code follows it."""
    heading, _, rest = page.lstrip("# ").partition("\n")
    paragraph = " ".join(rest.strip().partition("\n\n")[0].split())
    if not paragraph or paragraph.startswith(("```", "#", "|", "-")):
        return heading
    return re.sub(r"`|\*\*?", "", re.split(r"(?<=\.) ", paragraph)[0])


def show_page(page: str) -> None:
    """Show a page: as it is in a pipe; laid out on a terminal, in a pager if it is longer."""
    screen = console()
    if not sys.stdout.isatty():
        sys.stdout.write(page)
        return
    from rich.markdown import Markdown

    with screen.capture() as captured:
        screen.print(Markdown(page, hyperlinks=False), width=min(screen.width, _WIDEST))
    text = captured.get()
    if text.count("\n") < screen.height or not _page(text):
        sys.stdout.write(text)


def _page(text: str) -> bool:
    """Show a text in ``$PAGER`` or less, as git does; return whether a pager took it."""
    command = os.environ.get("PAGER", "less" if which("less") else "")
    if command in ("", "cat"):
        return False
    environment = {"LESS": "FRX", "LV": "-c", **os.environ}
    encoding = sys.stdout.encoding
    pager = subprocess.Popen(
        command, shell=True, stdin=subprocess.PIPE, env=environment, encoding=encoding
    )
    # Ctrl-C belongs to the pager, and leaving it early is no failure
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    pager.communicate(text)
    return pager.returncode not in _CANNOT_RUN
