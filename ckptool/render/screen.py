"""The screen and its lines.

Only a terminal needs rich, whose import takes an eighth of a short command.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console as Rich
    from rich.console import ConsoleOptions
    from rich.segment import Segment
    from rich.text import Text as RichText

Piece = tuple[str, str]
"""Text, and its style as rich names it; empty for none."""
Span = tuple[int, int, str]
"""The first and the last character (exclusive) of a part, and its style."""

MOST_LINES = 200
"""Lines of a list on a terminal."""
_UNBOUNDED = 1 << 16
_BATCH = 1 << 10
_WORD = re.compile(r"(?:`[^`]*`|\S)+")
_TERMINALS = {"FORCE_COLOR", "TTY_COMPATIBLE"}
"""Variables of the environment that make rich take anything for a terminal."""


class Text:
    """Text with styles of its parts: of rich's ``Text`` what is used here, by the same names."""

    __slots__ = ("plain", "spans")

    def __init__(self, text: str = "", style: str = "", spans: tuple[Span, ...] = ()) -> None:
        self.plain = text
        self.spans = ((0, len(text), style), *spans) if style and text else spans

    @classmethod
    def assemble(cls, *parts: str | Piece | Text) -> Text:
        """Return the text that parts make, one after the other."""
        made = cls()
        for part in parts:
            made.append(*part) if isinstance(part, tuple) else made.append(part)
        return made

    def append(self, part: str | Text, style: str = "") -> Text:
        """Add a part to the end, and return the text."""
        at, added = len(self.plain), part if isinstance(part, Text) else Text(part, style)
        if added.spans:
            moved = ((at + begin, at + end, style) for begin, end, style in added.spans)
            self.spans = (*self.spans, *moved)
        self.plain += added.plain
        return self

    def __add__(self, part: str | Text) -> Text:
        return Text.assemble(self, part)

    @property
    def cell_len(self) -> int:
        """How many cells of the screen it takes."""
        return cell_len(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, part: slice) -> Text:
        """Return a part of the characters, with their styles."""
        low, high, _ = part.indices(len(self.plain))
        spans = (
            (max(begin, low) - low, min(end, high) - low, style)
            for begin, end, style in self.spans
            if begin < high and end > low
        )
        return Text(self.plain[low:high], spans=tuple(spans))

    def rstrip(self) -> None:
        """Remove spaces from the end."""
        kept = self[: len(self.plain.rstrip())]
        self.plain, self.spans = kept.plain, kept.spans

    def split(self) -> list[Text]:
        """Return the lines, without their ends."""
        lines, at = list[Text](), 0
        for line in self.plain.split("\n"):
            lines.append(self[at : at + len(line)])
            at += len(line) + 1
        return lines

    def rich(self) -> RichText:
        """Return it as rich's."""
        from rich.text import Span as RichSpan
        from rich.text import Text as RichText

        return RichText(self.plain, spans=[RichSpan(*span) for span in self.spans])


def join(lines: Iterable[Text], between: str = "\n") -> Text:
    """Return lines as one text, with what is ``between`` each two of them."""
    joined = Text()
    for number, line in enumerate(lines):
        joined.append(between if number else "").append(line)
    return joined


def cell_len(text: str) -> int:
    """Return how many cells of the screen a text takes: some letters are twice as wide."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len as measured

    return measured(text)


class Console:
    """A file or a pipe: so wide that no line is ever cut or wrapped, and without colors."""

    width = _UNBOUNDED
    is_terminal = has_colors = False

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    @property
    def is_ascii(self) -> bool:
        """Whether it has no other letters."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return not encoding.lower().startswith("utf")

    def rich(self) -> Rich:
        """Return rich's console, which draws tables."""
        from rich.console import Console as Rich

        return Rich(file=self._stream, width=self.width, emoji=False, highlight=False)

    def emit(self, lines: Sequence[Text]) -> None:
        """Print lines."""
        for start in range(0, len(lines), _BATCH):
            batch = lines[start : start + _BATCH]
            self._stream.write("".join([f"{line.plain}\n" for line in batch]))
        self._stream.flush()


class RichConsole(Console):
    """A terminal, or a recording, which becomes as wide as its lines need if nobody sees it."""

    def __init__(self, shown: Rich) -> None:
        super().__init__(shown.file)
        self._shown = shown
        self.width = shown.width
        self.is_terminal = shown.is_terminal
        self.has_colors = shown.color_system is not None and not shown.no_color

    def rich(self) -> Rich:
        """Return rich's console."""
        return self._shown

    def emit(self, lines: Sequence[Text]) -> None:
        """Print lines; those that are longer than a terminal are wrapped between words."""
        if self.is_terminal:
            lines = [_wrapped(part, self.width) for line in lines for part in line.split()]
        else:
            self._shown.width = max((line.cell_len for line in lines), default=0) + 2
        for start in range(0, len(lines), _BATCH):
            batch = _Lines(line.rich() for line in lines[start : start + _BATCH])
            self._shown.print(batch, end="", soft_wrap=True)


class _Lines(list["RichText"]):
    """Lines to print at once: printing each alone costs rich as much as thirty do."""

    def __rich_console__(self, shown: Rich, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield the pieces of all lines, none of which is cut or wrapped."""
        for line in self:
            yield from line.render(shown, end="\n")


def console(stderr: bool = False, record: bool = False) -> Console:
    """Return the screen of a stream; with ``record``, one that rich can export."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    if not (record or stream.isatty() or _TERMINALS & os.environ.keys()):
        return Console(stream)
    from rich.console import Console as Rich

    width = None if stream.isatty() else _UNBOUNDED
    shown = Rich(stderr=stderr, record=record, width=width, emoji=False, highlight=False)
    return RichConsole(shown)


def say(screen: Console, *parts: str | Piece | Text) -> None:
    """Print the lines that parts make, however long."""
    screen.emit(Text.assemble(*parts).split())


def first_lines(screen: Console, lines: Sequence[Text]) -> list[Text]:
    """Return the lines; on a terminal only the first ones, and a line that counts the rest."""
    if not screen.is_terminal or len(lines) <= MOST_LINES:
        return list(lines)
    rest = f"  ... and {len(lines) - MOST_LINES:,} more lines; --json lists all"
    return [*lines[:MOST_LINES], Text(rest, "dim")]


def _wrapped(line: Text, room: int) -> Text:
    """Wrap a line between words; a command in backticks is one, so that it can be copied.

    Further lines are indented by two more cells. A longer word is left to the terminal.
    """
    if line.cell_len <= room:
        return line
    text = line.plain
    further = f"{indent_of(line)}  "
    pieces, begin, end = list[Text](), 0, 0
    for word in _WORD.finditer(text):
        taken = cell_len(text[begin : word.end()]) + (len(further) if pieces else 0)
        if taken > room and end > begin:
            pieces.append(line[begin:end])
            begin = word.start()
        end = word.end()
    return join([*pieces, line[begin:end]], f"\n{further}")


def indent_of(line: Text) -> str:
    """Return the spaces before the first word."""
    return " " * (len(line.plain) - len(line.plain.lstrip()))
