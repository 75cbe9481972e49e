"""The result or plan of a conversion, and the effect of a key map on each tensor."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.fold import (
    Numbers,
    fold_names,
    split_numbers,
    with_numbers,
)
from ckptool.core.dtype import short_name
from ckptool.core.layout import FileLayout
from ckptool.core.state_category import STATE_CATEGORIES, state_category
from ckptool.core.text import free, natural_key, plural, size, visible
from ckptool.render.text import columns, console, emit, escaped, first_lines

if TYPE_CHECKING:
    from ckptool.commands.keymap.maps import MapReport
    from ckptool.commands.merge import MergeReport
    from ckptool.commands.runs.convert import ConvertRunReport, State
    from ckptool.commands.transfer.report import Part, TransferReport
    from ckptool.commands.transfer.rewritten import RewrittenReport
    from ckptool.core.keymap.apply import Move

_DIGITS = re.compile(r"([0-9]+)")
_FEW = 3
"""Files that are alike, of which fewer are listed."""


def show_convert(report: RewrittenReport) -> None:
    """Show a line for the whole; for a dry run also the files and the figures."""
    dry_run = not report.written
    screen = console()
    verb = "would write" if dry_run else "wrote"
    lines = [
        Text.assemble(
            f"{verb} ",
            (visible(str(report.target)), "bold"),
            f" ({report.target_format}): {plural(report.tensors, 'tensor')},"
            f" {plural(report.objects, 'value')}, {size(report.write_bytes)}"
            f" in {plural(len(report.files), 'file')}, from {report.source_format}",
        )
    ]
    lines += map(Text, rewriting_lines(report))
    if dry_run:
        read, written = size(report.read_bytes), size(report.write_bytes)
        room = free(report.free_bytes)
        lines.append(Text(f"  reads {read}, writes {written}{room}{compares(report)}"))
        lines += map(Text, planned_part(report))
    emit(screen, lines)
    if dry_run:
        if report.map is not None:
            show_moves(report.map, screen)
        show_files(report.files, screen)


_STATES: dict[State, str] = {
    "written": "green",
    "equal": "green",
    "planned": "",
    "not good": "red",
    "left out": "yellow",
    "failed": "red",
}


def show_converted_steps(report: ConvertRunReport) -> None:
    """Show a table of the steps, newest first, then how many there are of each state."""
    screen = console()
    rows = [
        (
            "" if step.number is None else str(step.number),
            str(step.path).removeprefix(f"{report.path}/"),
            (step.state, _STATES[step.state]),
            "" if step.nbytes is None else size(step.nbytes),
            step.reason or str(step.target),
        )
        for step in report.steps
    ]
    heads = ("step", "checkpoint", "", "size", "")
    emit(screen, columns(screen, rows, "rllrl", heads=heads))
    counts = {state: len(report.of_state(state)) for state in _STATES}
    said = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    answer = ("OK", "bold green") if report.ok else ("FAILED", "bold red")
    emit(screen, [Text(), Text.assemble(answer, f": {said or 'no step'}")])


def show_merge(report: MergeReport) -> None:
    """Show a line for the whole and one for each expression; for a dry run also its tensors."""
    show_convert(report)
    lines = []
    names = defaultdict[str, list[str]](list)
    for expression in report.expressions:
        names[expression.text].append(expression.name)
    for text, of_text in names.items():
        lines.append(Text(f"  {plural(len(of_text), 'tensor')} = {visible(text)}"))
        if not report.written:
            folded = fold_names(dict.fromkeys(of_text))
            lines += [Text(f"    {visible(name)}") for name, *_ in folded]
    emit(console(), lines)


def rewriting_lines(report: RewrittenReport) -> Iterator[str]:
    """Yield what was matched, with some of the names, and what was cast, renamed and excluded."""
    for matched in report.matched:
        such = ", such as" if matched.tensors + matched.values > len(matched.names) else ":"
        counted = _counted(matched.tensors, matched.values)
        yield f"  {matched.option} {visible(matched.pattern)} matches {counted}{such}"
        yield from (f"    {visible(name)}" for name in matched.names)
    for what, counts in (("cast", report.cast), ("dequantized", report.dequantized)):
        yield from (
            f"  {what}: {plural(count, 'tensor')} from {short_name(kind)}"
            for kind, count in counts.items()
        )
    if renamed := _counted(report.renamed.tensors, report.renamed.values):
        yield f"  renamed: {renamed}"
    if report.unwrapped:
        prefixes = ", ".join(f"`{visible(prefix)}.`" for prefix in report.unwrapped)
        yield f"  names: {prefixes} removed"
    yield from (f"  excluded: {line}" for line in report.excluded)


def _counted(tensors: int, values: int) -> str:
    """Return how many tensors and values there are; nothing if there are none."""
    counts = (tensors, "tensor"), (values, "value")
    return ", ".join(plural(count, noun) for count, noun in counts if count)


def show_part(report: TransferReport, part: Part) -> None:
    """Show what one part wrote, and the next step."""
    target = visible(str(report.target))
    line = Text.assemble(
        f"wrote part {part.number} of {part.of} of ", (target, "bold"), f": {_size_of(part)}"
    )
    after = "  once all parts are written, run the same command with --finish in place of --part"
    emit(console(), [line, Text(after)])


def planned_part(report: TransferReport) -> list[str]:
    """Return the line on the planned output of the requested part; none for the whole."""
    part = report.part
    if part is None:
        return []
    return [f"  of this, part {part.number} of {part.of} writes {_size_of(part)}"]


def _size_of(part: Part) -> str:
    return f"{plural(part.files, 'file')}, {size(part.nbytes)}"


def compares(report: TransferReport) -> str:
    """Return the end of the line on reads and writes that says what is read to compare them."""
    again = f", and {size(report.reread_bytes)} of the source again" if report.reread_bytes else ""
    return f", then reads the output back to verify it{again}" if report.verify else ""


def show_files(files: Iterable[FileLayout], screen: Console) -> None:
    """Show every file with its size; those whose names differ in one number are one line."""
    rows = [row for alike in _alike(files) for row in _file_rows(alike)]
    emit(screen, first_lines(screen, columns(screen, rows, "rlr", cuts=1)))


def _alike(files: Iterable[FileLayout]) -> list[list[FileLayout]]:
    """Group files whose names differ in numbers only."""
    groups: dict[tuple[str, ...], list[FileLayout]] = defaultdict(list)
    for file in files:
        groups[tuple(_DIGITS.split(file.path)[::2])].append(file)
    return list(groups.values())


def _file_rows(alike: Sequence[FileLayout]) -> list[list[str]]:
    """Return a row for each file, or one for all if they count from the first to the last."""
    each = [_DIGITS.split(file.path) for file in alike]
    varied = [at for at, place in enumerate(zip(*each, strict=True)) if len({*place}) > 1]
    numbers = [int(pieces[varied[0]]) for pieces in each] if len(varied) == 1 else []
    if len(numbers) < _FEW or numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
        return [[size(file.nbytes), file.path, ""] for file in alike]
    (at,), first, last = varied, each[0], each[-1]
    name = "".join([*first[:at], f"{{{first[at]}..{last[at]}}}", *first[at + 1 :]])
    return [[size(sum(file.nbytes for file in alike)), name, f"x{len(alike)}"]]


# Key maps


def show_moves(report: MapReport, screen: Console) -> None:
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
    screen.print(table)


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
