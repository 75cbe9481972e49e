"""Words and numbers for the screen: escaping, sizes, aligned columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptool.render.screen import Console, Piece, Span, Text, cell_len, indent_of, join

if TYPE_CHECKING:
    from rich.table import Table

Cell = str | Piece | Text
"""A cell: untrusted text, alone or with its style, or a finished text."""

_NARROWEST = 12
_NARROWEST_WORDS = 26
_HEAD_SHARES = (0.5, 0.3, 0.15, 0.7, 0.9)
"""The share of a shortened text before the ellipsis; the one that keeps most distinct is used."""
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_EIGHTHS = " ▏▎▍▌▋▊▉"


def visible(text: str) -> str:
    """Spell out control, direction and other unprintable characters of untrusted text."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def size(nbytes: int) -> str:
    """Return ``1.56 GiB``: three significant digits in units of 1024."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, list(_UNITS)
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{_three_digits(value)} {units[0]}"


def free(nbytes: int | None) -> str:
    """Return the text on a disk's free bytes, if there is a disk."""
    return "" if nbytes is None else f", {size(nbytes)} free"


def magnitude(count: int) -> str:
    """Return ``6.74 B``: a rounded count; small ones in full."""
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**4, "K")):
        if count >= limit:
            return f"{_three_digits(count / (1000 if unit == 'K' else limit))} {unit}"
    return f"{count:,}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


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
    kept = min(widths[cuts], max(_NARROWEST, widths[cuts] - excess)) if cuts is not None else 0
    if cuts is not None and widths[cuts] - kept >= excess:
        cells = _shorten([row[cuts] for row in parts], kept)
        if all(cell.width <= kept for cell in cells):
            widths[cuts] = kept
            parts = [
                [*row[:cuts], cell, *row[cuts + 1 :]]
                for row, cell in zip(parts, cells, strict=True)
            ]
            return [_line(row, widths, aligns) for row in parts]
    longest = max(range(len(widths)), key=widths.__getitem__)
    return [_stacked(row, widths, aligns, longest, screen.width) for row in parts]


class _Part(NamedTuple):
    """A cell's visible text, its style and spans, and the cells of the screen that it takes."""

    plain: str
    style: str
    spans: Sequence[Span]
    width: int


def _part(cell: Cell) -> _Part:
    if isinstance(cell, Text):
        return _Part(cell.plain, "", cell.spans, cell.cell_len)
    text, style = (cell, "") if isinstance(cell, str) else cell
    text = visible(text)
    return _Part(text, style, (), cell_len(text))


def cell_width(cell: Cell) -> int:
    """Return how many cells of the screen a cell takes."""
    return _part(cell).width


def _line(row: Sequence[_Part], widths: Sequence[int], aligns: str) -> Text:
    pieces, spans, end = list[str](), list[Span](), 0
    for (text, style, own, taken), width, align in zip(row, widths, aligns, strict=True):
        if not width:
            continue
        padding = " " * (width - taken)
        pieces += ("  ", padding, text) if align == "r" else ("  ", text, padding)
        begin = end + 2 + (len(padding) if align == "r" else 0)
        end += 2 + len(padding) + len(text)
        if style and text:
            spans.append((begin, begin + len(text), style))
        spans += [(begin + first, begin + last, kind) for first, last, kind in own]
    line = Text("".join(pieces), spans=tuple(spans))
    line.rstrip()
    return line


def _stacked(
    row: Sequence[_Part], widths: Sequence[int], aligns: str, longest: int, room: int
) -> Text:
    """Return a row in which one cell has its own lines, before or after the others.

    The last cell begins beside the others if there is room for some words.
    """
    rest = [0 if at == longest else width for at, width in enumerate(widths)]
    beside = sum(width + 2 for width in rest if width)
    others = _line(row, rest, aligns)
    cell = _line([row[longest]], [row[longest].width], "l")
    if longest < len(widths) - 1:
        deeper = "" if beside <= room < beside + 2 else indent_of(cell)
        lines = [cell, Text.assemble(deeper, others)]
        return join(_folded(line, room) for line in lines if line.plain.strip())
    if room - beside < _NARROWEST_WORDS:
        lines = [others, Text.assemble(indent_of(others), cell)]
        return join(_folded(line, room) for line in lines if line.plain.strip())
    first, *more = _folded(cell, room - beside, deeper=0).split()
    others.append(" " * (beside - others.cell_len))
    line = join([others + first, *(Text(" " * beside) + each for each in more)])
    line.rstrip()
    return line


def _folded(line: Text, room: int, deeper: int = 2) -> Text:
    """Fold a line at spaces, else after punctuation in a name; further lines are indented more.

    No line is indented by more than half of the room.
    """
    if line.cell_len <= room:
        return line
    line.rstrip()
    found = len(indent_of(line))
    indent, further = (" " * min(cells, room // 2) for cells in (found, found + deeper))
    line = Text.assemble(indent, line[found:])
    pieces: list[Text] = []
    while line.cell_len > room:
        at = _break_in(line.plain, room, len(further if pieces else indent))
        pieces.append(line[:at])
        pieces[-1].rstrip()
        rest = line[at:]
        line = Text.assemble(further, rest[len(indent_of(rest)) :])
    return join([*pieces, line])


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


def _shorten(parts: Sequence[_Part], width: int) -> list[_Part]:
    """Shorten parts to ``width`` cells; those that would look like others stay whole."""
    long = {part.plain for part in parts if part.width > width}
    short = {part.plain for part in parts} - long
    best: dict[str, float] = {}
    for share in _HEAD_SHARES if long else ():
        cut = {text: without_inside(Text(text), width, share).plain for text in long}
        counts = Counter((*cut.values(), *short))
        apart = dict.fromkeys((text for text, seen in cut.items() if counts[seen] == 1), share)
        best = max(best, apart, key=len)
        if len(best) == len(long):
            break
    return [_cut(part, width, best[part.plain]) if part.plain in best else part for part in parts]


def _cut(part: _Part, width: int, head: float) -> _Part:
    whole = Text(part.plain, part.style, tuple(part.spans))
    return _part(without_inside(whole, width, head))


def without_inside(text: Text, width: int, head: float) -> Text:
    """Shorten a text to ``width`` cells, with the share ``head`` before the ellipsis."""
    if text.cell_len <= width:
        return text
    kept = width - 1
    while True:
        before = _before_ellipsis(text.plain, kept, head)
        first, last = text[:before], text[len(text) - (kept - before) :]
        if first.cell_len + last.cell_len < width or not kept:
            return Text.assemble(first, ("…", "dim"), last)
        kept -= 1


def _before_ellipsis(text: str, kept: int, head: float) -> int:
    """Return how many of ``kept`` characters come first; ``{0..11}`` is not cut if possible."""
    wanted = round(kept * head)
    if "{" not in text:
        return wanted

    def has_whole_braces(before: int) -> bool:
        ends = text[:before], text[len(text) - kept + before :]
        return all(end.count("{") == end.count("}") for end in ends)

    nearest = sorted(range(kept + 1), key=lambda before: abs(before - wanted))
    return next(filter(has_whole_braces, nearest), wanted)


def header_table(*fixed: str, folded: Sequence[str], width: int | None = None) -> Table:
    """Return an empty table: columns at least ``width`` cells wide, then folded ones."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in fixed:
        table.add_column(heading, no_wrap=True, min_width=width)
    for heading in folded:
        table.add_column(heading, overflow="fold")
    return table
