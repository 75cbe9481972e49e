"""Lines of the screen: the console, escaping, bars, aligned columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style
from rich.text import Span, Text

from ckptool.core.text import visible
from ckptool.render.data import stream_of

Cell = str | tuple[str, str] | Text
"""A cell: untrusted text, alone or with its style, or a finished text."""

_UNBOUNDED = 1 << 16
_NARROWEST = 12
_NARROWEST_WORDS = 26
_HEAD_SHARES = (0.5, 0.3, 0.15, 0.7, 0.9)
"""The share of a shortened text before the ellipsis; the one that keeps most distinct is used."""
_BATCH = 1 << 10
MOST_LINES = 200
"""Lines of a list on a terminal."""
_WORD = re.compile(r"(?:`[^`]*`|\S)+")
_EIGHTHS = " ▏▎▍▌▋▊▉"


def console(stderr: bool = False, record: bool = False) -> Console:
    """Return the console; if not a terminal, it is so wide that no line is ever cut or wrapped."""
    width = None if stream_of(stderr=stderr).isatty() else _UNBOUNDED
    return Console(stderr=stderr, record=record, width=width, emoji=False, highlight=False)


def escaped(text: str) -> str:
    """Make untrusted text safe inside rich markup."""
    return escape(visible(text))


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """Draw a bar of ``share`` (0 to 1) of ``width`` cells; anything above zero shows."""
    if ascii_only:
        return "#" * max(round(share * width), share > 0)
    eighths = max(round(share * width * 8), share > 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def columns(
    screen: Console,
    rows: Iterable[Sequence[Cell]],
    aligns: str,
    *,
    heads: Sequence[str] = (),
    cuts: int | None = None,
) -> list[Text]:
    """Align rows as lines, indented by two cells. ``aligns`` has an ``l`` or ``r`` per column.

    On a terminal that is too narrow, the cells of column ``cuts`` are shortened inside, so that no
    two different ones look alike. If that is impossible, and for rows without such a column, the
    widest cell has its own lines: first, or last if it is the last one. A row is one text, however
    many lines it takes.
    """
    headings = [[_part((head, "dim")) for head in heads]] if heads else []
    parts = [*headings, *([_part(cell) for cell in row] for row in rows)]
    widths = [max((row[i].width for row in parts), default=0) for i in range(len(aligns))]
    excess = sum(width + 2 for width in widths if width) - screen.width
    if excess <= 0 or not screen.is_terminal:
        return [_line(row, widths, aligns) for row in parts]
    room = min(widths[cuts], max(_NARROWEST, widths[cuts] - excess)) if cuts is not None else 0
    if cuts is not None and widths[cuts] - room >= excess:
        cells = _shorten([row[cuts] for row in parts], room)
        if all(cell.width <= room for cell in cells):
            widths[cuts] = room
            parts = [
                [*row[:cuts], cell, *row[cuts + 1 :]]
                for row, cell in zip(parts, cells, strict=True)
            ]
            return [_line(row, widths, aligns) for row in parts]
    longest = max(range(len(widths)), key=widths.__getitem__)
    return [_stack(row, widths, aligns, longest, screen.width) for row in parts]


class _Part(NamedTuple):
    """A cell's visible text, its style and spans, and the cells of the screen that it takes.

    A tuple: rich takes ten times as long to make a ``Text``, and to append one to another.
    """

    plain: str
    style: str | Style
    spans: Sequence[Span]
    width: int


def _part(cell: Cell) -> _Part:
    if isinstance(cell, Text):
        return _Part(cell.plain, cell.style, cell.spans, cell.cell_len)
    text, style = (cell, "") if isinstance(cell, str) else cell
    text = visible(text)
    return _Part(text, style, (), cell_len(text))


def cell_width(cell: Cell) -> int:
    """Return how many cells of the screen a cell takes."""
    return _part(cell).width


def _line(row: Sequence[_Part], widths: Sequence[int], aligns: str) -> Text:
    pieces, spans, end = list[str](), list[Span](), 0
    for part, width, align in zip(row, widths, aligns, strict=True):
        if not width:
            continue
        text, style, inner_spans, cells = part
        padding = " " * max(0, width - cells)
        pieces += ("  ", padding, text) if align == "r" else ("  ", text, padding)
        begin = end + 2 + (len(padding) if align == "r" else 0)
        end += 2 + len(padding) + len(text)
        if style:
            spans.append(Span(begin, begin + len(text), style))
        spans += [span.move(begin) for span in inner_spans]
    line = Text("".join(pieces), spans=spans)
    line.rstrip()
    return line


def _stack(
    row: Sequence[_Part], widths: Sequence[int], aligns: str, longest: int, room: int
) -> Text:
    """Return a row in which one cell has its own lines, before or after the others.

    The last cell begins beside the others if there is room for some words.
    """
    rest = [0 if at == longest else width for at, width in enumerate(widths)]
    column = sum(width + 2 for width in rest if width)
    rest_line = _line(row, rest, aligns)
    cell = _line([row[longest]], [row[longest].width], "l")
    if longest < len(widths) - 1:
        deeper = "" if column <= room < column + 2 else _indent(cell)
        lines = [cell, Text.assemble(deeper, rest_line)]
        return _NEW_LINE.join(_fold(line, room) for line in lines if line.plain.strip())
    if room - column < _NARROWEST_WORDS:
        lines = [rest_line, Text.assemble(_indent(rest_line), cell)]
        return _NEW_LINE.join(_fold(line, room) for line in lines if line.plain.strip())
    first, *rows = _fold(cell, room - column, deeper=0).split("\n")
    rest_line.pad_right(column - rest_line.cell_len)
    line = _NEW_LINE.join([rest_line + first, *(Text(" " * column) + part for part in rows)])
    line.rstrip()
    return line


def _indent(line: Text) -> str:
    return " " * (len(line.plain) - len(line.plain.lstrip()))


def _fold(line: Text, room: int, deeper: int = 2) -> Text:
    """Fold a line at spaces, else after punctuation in a name; further lines are indented more.

    No line is indented by more than half of the room.
    """
    if line.cell_len <= room:
        return line
    line.rstrip()
    depth = len(_indent(line))
    indent, further = (" " * min(cells, room // 2) for cells in (depth, depth + deeper))
    line = Text.assemble(indent, line[depth:])
    pieces: list[Text] = []
    while line.cell_len > room:
        at = _break_in(line.plain, room, len(further if pieces else indent))
        pieces.append(line[:at])
        pieces[-1].rstrip()
        rest = line[at:]
        line = Text.assemble(further, rest[len(_indent(rest)) :])
    return _NEW_LINE.join([*pieces, line])


def _break_in(text: str, room: int, indent: int) -> int:
    """Return where to break a text, so that its beginning takes at most ``room`` cells."""
    end = indent + 1
    while end < len(text) and cell_len(text[: end + 1]) <= room:
        end += 1
    for marks in (" ", "./_,"):
        at = max(text.rfind(mark, indent + 1, end) for mark in marks) + 1
        if at > max(indent + 1, end // 3):
            return at
    return end


_NEW_LINE = Text("\n")


def _shorten(parts: Sequence[_Part], width: int) -> list[_Part]:
    """Shorten parts to ``width`` cells; those that would look like others stay whole."""
    long = {part.plain for part in parts if part.width > width}
    short = {part.plain for part in parts} - long
    best: dict[str, float] = {}
    for share in _HEAD_SHARES if long else ():
        cut = {text: without_inside(Text(text), width, share).plain for text in long}
        counts = Counter((*cut.values(), *short))
        shares = dict.fromkeys((text for text, end in cut.items() if counts[end] == 1), share)
        best = max(best, shares, key=len)
        if len(best) == len(long):
            break
    return [_cut(part, width, best[part.plain]) if part.plain in best else part for part in parts]


def _cut(part: _Part, width: int, head: float) -> _Part:
    text = Text(part.plain, part.style, spans=list(part.spans))
    return _part(without_inside(text, width, head))


def without_inside(text: Text, width: int, head: float) -> Text:
    """Shorten a text to ``width`` cells, with the share ``head`` before the ellipsis."""
    if text.cell_len <= width:
        return text
    count = width - 1
    while True:
        begin = _before_ellipsis(text.plain, count, head)
        first, last = text[:begin], text[len(text) - (count - begin) :]
        if first.cell_len + last.cell_len < width or not count:
            return Text.assemble(first, ("…", "dim"), last)
        count -= 1


def _before_ellipsis(text: str, count: int, head: float) -> int:
    """Return how many of ``count`` characters come first; ``{0..11}`` is not cut if possible."""
    target = round(count * head)
    if "{" not in text:
        return target

    def has_whole_braces(position: int) -> bool:
        ends = text[:position], text[len(text) - count + position :]
        return all(end.count("{") == end.count("}") for end in ends)

    positions = sorted(range(count + 1), key=lambda position: abs(position - target))
    return next(filter(has_whole_braces, positions), target)


def emit(screen: Console, lines: Iterable[Text]) -> None:
    """Print lines; an unwatched recording becomes as wide as they need.

    On a terminal a line that is too long is wrapped between words.
    """
    lines = list(lines)
    if screen.is_terminal:
        lines = [_wrap(part, screen.width) for line in lines for part in _parts_of(line)]
    if screen.record and not screen.is_terminal:
        screen.width = max((cell_len(line.plain) for line in lines), default=0) + 2
    for start in range(0, len(lines), _BATCH):
        screen.print(_Lines(lines[start : start + _BATCH]), end="", soft_wrap=True)


def first_lines(screen: Console, lines: Sequence[Text]) -> list[Text]:
    """Return the lines; on a terminal only the first ones, and a line that counts the rest."""
    if not screen.is_terminal or len(lines) <= MOST_LINES:
        return list(lines)
    rest = f"  ... and {len(lines) - MOST_LINES:,} more lines; --json lists all"
    return [*lines[:MOST_LINES], Text(rest, style="dim")]


def _parts_of(line: Text) -> Iterable[Text]:
    return line.split(allow_blank=True) if "\n" in line.plain else [line]


def _wrap(line: Text, room: int) -> Text:
    """Wrap a line between words; a command in backticks is one, so that it can be copied.

    Further lines are indented by two more cells. A longer word is left to the terminal.
    """
    if line.cell_len <= room:
        return line
    further = f"{_indent(line)}  "
    pieces, begin, end = list[Text](), 0, 0
    for word in _WORD.finditer(line.plain):
        width = cell_len(line.plain[begin : word.end()]) + (len(further) if pieces else 0)
        if width > room and end > begin:
            pieces.append(line[begin:end])
            begin = word.start()
        end = word.end()
    return Text(f"\n{further}").join([*pieces, line[begin:end]])


class _Lines(list[Text]):
    """Lines to print at once: printing each alone costs rich as much as thirty do."""

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield the pieces of all lines, none of which is cut or wrapped."""
        from rich.segment import Segment

        if screen.color_system is None and not screen.record:  # all that rich would keep of them
            yield Segment("".join(f"{line.plain}\n" for line in self))
            return
        for line in self:
            yield from line.render(screen, end="\n")
