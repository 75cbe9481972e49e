"""The plan of a dry run: how each tensor is named and placed, and the files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from ckptool.commands.inspect.fold import Numbers, fold, split_numbers, with_numbers
from ckptool.core.layout import FileLayout
from ckptool.core.state_category import STATE_CATEGORIES, state_category
from ckptool.core.text import natural_key, size
from ckptool.render.inspect.listing import ROOMY, line_name, placements_text
from ckptool.render.text import Cell, columns, console, emit, escaped, first_lines

if TYPE_CHECKING:
    from ckptool.commands.keymap.maps import MapReport
    from ckptool.commands.reshard.reshard import ReshardReport
    from ckptool.core.keymap.apply import Move

_DIGITS = re.compile(r"([0-9]+)")
_FEW = 3
"""Files that are alike, of which fewer are listed."""


def show_choices(report: ReshardReport) -> None:
    """Show a line per tensor, folded as inspect does; reasons only where they differ."""
    screen = console()
    brief = screen.is_terminal and screen.width < ROOMY
    differ = len({choice.reason for choice in report.choices.values()}) > 1
    lines = fold(report.entries.values(), lambda entry: report.choices[entry.name])
    rows: list[list[Cell]] = []
    for line in lines:
        choice = report.choices[line.entry.name]
        rows.append(
            [
                Text("  ") + line_name(line, screen, brief),
                (placements_text(choice.placements, brief), "magenta"),
                (f"({choice.reason})" if differ else "", "dim"),
                (f"x{line.count}" if line.count > 1 else "", "bold"),
            ]
        )
    emit(screen, first_lines(screen, columns(screen, rows, "lllr", cuts=0)))


def show_files(files: Iterable[FileLayout]) -> None:
    """Show every file with its size; those whose names differ in one number are one line."""
    screen = console()
    rows = [row for group in _group_similar(files) for row in _file_rows(group)]
    emit(screen, first_lines(screen, columns(screen, rows, "rlr", cuts=1)))


def _group_similar(files: Iterable[FileLayout]) -> list[list[FileLayout]]:
    """Group files whose names differ in numbers only."""
    groups: dict[tuple[str, ...], list[FileLayout]] = defaultdict(list)
    for file in files:
        groups[tuple(_DIGITS.split(file.path)[::2])].append(file)
    return list(groups.values())


def _file_rows(files: Sequence[FileLayout]) -> list[list[str]]:
    """Return a row for each file, or one for all if they count from the first to the last."""
    names = [_DIGITS.split(file.path) for file in files]
    places = [at for at, place in enumerate(zip(*names, strict=True)) if len({*place}) > 1]
    numbers = [int(pieces[places[0]]) for pieces in names] if len(places) == 1 else []
    if len(numbers) < _FEW or numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
        return [[size(file.nbytes), file.path, ""] for file in files]
    (at,), first, last = places, names[0], names[-1]
    name = "".join([*first[:at], f"{{{first[at]}..{last[at]}}}", *first[at + 1 :]])
    return [[size(sum(file.nbytes for file in files)), name, f"x{len(files)}"]]


def show_moves(report: MapReport) -> None:
    """Show one line for similar tensors whose names differ only in numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 0, 0, 2), show_header=False)
    for overflow in ("fold", "ellipsis", "fold", "ellipsis", "ellipsis"):
        table.add_column(overflow=overflow)
    for moves in _group(report.moves):
        sources = _join_names(name for move in moves for name in move.sources)
        targets = _join_names(move.target for move in moves)
        shape = escaped(str(list(moves[0].entry.shape)))
        table.add_row(sources, "->", targets, shape, escaped(moves[0].operation))
    console().print(table)


def _group(moves: Iterable[Move]) -> list[list[Move]]:
    """Group the moves that share a line, the model's first, in natural order."""
    groups: dict[object, list[Move]] = defaultdict(list)

    def order(move: Move) -> tuple[int, object]:
        return STATE_CATEGORIES.index(state_category(move.entry)), natural_key(move.sources[0])

    for move in sorted(moves, key=order):
        words = tuple(dict.fromkeys(split_numbers(name)[0] for name in move.sources))
        kind = (words, split_numbers(move.target)[0], move.entry.shape, move.operation)
        groups[kind].append(move)
    return list(groups.values())


def _join_names(names: Iterable[str]) -> str:
    """Join names that differ only in numbers, one per line, with all the numbers at each place."""
    numbered: dict[tuple[str, ...], set[Numbers]] = defaultdict(set)
    for name in names:
        words, numbers = split_numbers(name)
        numbered[words].add(numbers)
    lines = []
    for words, tuples in numbered.items():
        at_each_place = [tuple(sorted(set(place))) for place in zip(*tuples, strict=True)]
        lines.append(escaped(with_numbers(words, at_each_place)))
    return "\n".join(lines)
