"""What a key map does to each tensor: old names, new name, shape, operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ckptool.core.state_category import STATE_CATEGORIES, state_category
from ckptool.render.inspect.listing import Numbers, natural, split_numbers, with_numbers
from ckptool.render.text import escaped

if TYPE_CHECKING:
    from ckptool.commands.keymap.builtin import MapReport
    from ckptool.core.keymap.apply import Move


def show_moves(report: MapReport, screen: Console) -> None:
    """One line for all tensors that are made alike and differ only in numbers of their names."""
    table = Table(box=None, padding=(0, 0, 0, 2), show_header=False)
    table.add_column(overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    table.add_column()
    table.add_column()
    for moves in _alike(report.moves):
        sources = _folded(name for move in moves for name in move.sources)
        targets = _folded(move.target for move in moves)
        first = moves[0]
        shape = f"[{', '.join(map(str, first.entry.shape))}]"
        table.add_row(
            "\n".join(map(escaped, sources)),
            "->",
            "\n".join(map(escaped, targets)),
            escaped(shape),
            first.operation,
        )
    screen.print(table)


def _alike(moves: Iterable[Move]) -> list[list[Move]]:
    """Moves that share a line, the model's first, in natural order."""
    found: dict[object, list[Move]] = defaultdict(list)
    for move in sorted(moves, key=_order):
        words = tuple(dict.fromkeys(split_numbers(name)[0] for name in move.sources))
        kind = (words, split_numbers(move.target)[0], move.entry.shape, move.operation)
        found[kind].append(move)
    return list(found.values())


def _order(move: Move) -> tuple[int, object]:
    name = move.sources[0]
    return STATE_CATEGORIES.index(state_category(move.entry)), natural(name)


def _folded(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers as one, with all the numbers at each place."""
    found: dict[tuple[str, ...], set[Numbers]] = defaultdict(set)
    for name in names:
        words, numbers = split_numbers(name)
        found[words].add(numbers)
    return [with_numbers(words, _at_each_place(numbers)) for words, numbers in found.items()]


def _at_each_place(numbers: Iterable[Numbers]) -> Sequence[Numbers]:
    return [tuple(sorted(set(place))) for place in zip(*numbers, strict=True)]


def moves_json(report: MapReport | None) -> dict[str, Any] | None:
    """The map, and every tensor it makes."""
    if report is None:
        return None
    return {
        "name": report.name,
        "from": report.source,
        "to": report.target,
        "reason": report.reason,
        "excluded": list(report.excluded),
        "tensors": [
            {
                "from": list(move.sources),
                "to": move.target,
                "dtype": move.entry.dtype.name,
                "shape": list(move.entry.shape),
                "operation": move.operation,
            }
            for move in report.moves
        ],
    }
