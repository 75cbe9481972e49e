"""The result or plan of a conversion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptool.core.dtype import short_name
from ckptool.core.text import free, plural, size
from ckptool.render.messages import Line, show_lines

if TYPE_CHECKING:
    from ckptool.commands.merge import MergeReport
    from ckptool.commands.runs.convert import ConvertRunReport, State
    from ckptool.commands.transfer.report import Part, TransferReport
    from ckptool.commands.transfer.rewritten import RewrittenReport


def show_convert(report: RewrittenReport) -> None:
    """Show a line for the whole; for a dry run also the files and the figures."""
    dry_run = not report.written
    verb = "would write" if dry_run else "wrote"
    lines: list[Line] = [
        [
            f"{verb} ",
            (str(report.target), "bold"),
            f" ({report.target_format}): {plural(report.tensors, 'tensor')},"
            f" {plural(report.objects, 'value')}, {size(report.write_bytes)}"
            f" in {plural(len(report.files), 'file')}, from {report.source_format}",
        ]
    ]
    lines += ([line] for line in rewriting_lines(report))
    if not dry_run:
        show_lines(lines)
        return
    from ckptool.render.plan import show_files, show_moves

    read, written = size(report.read_bytes), size(report.write_bytes)
    room = free(report.free_bytes)
    lines.append([f"  reads {read}, writes {written}{room}{compares(report)}"])
    lines += ([line] for line in planned_part(report))
    show_lines(lines)
    if report.map is not None:
        show_moves(report.map)
    show_files(report.files)


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
    from ckptool.render.text import columns, console, emit

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
    summary = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    answer = ("OK", "bold green") if report.ok else ("FAILED", "bold red")
    show_lines([[], [answer, f": {summary or 'no step'}"]])


def show_merge(report: MergeReport) -> None:
    """Show a line for the whole and one for each expression; for a dry run also its tensors."""
    from ckptool.commands.inspect.fold import fold_names

    show_convert(report)
    lines: list[Line] = []
    names = defaultdict[str, list[str]](list)
    for expression in report.expressions:
        names[expression.text].append(expression.name)
    for text, of_text in names.items():
        lines.append([f"  {plural(len(of_text), 'tensor')} = {text}"])
        if not report.written:
            folded = fold_names(dict.fromkeys(of_text))
            lines += [[f"    {name}"] for name, *_ in folded]
    show_lines(lines)


def rewriting_lines(report: RewrittenReport) -> Iterator[str]:
    """Yield what was matched, with some of the names, and what was cast, renamed and excluded."""
    for matched in report.matched:
        separator = ", such as" if matched.tensors + matched.values > len(matched.names) else ":"
        counted = _count(matched.tensors, matched.values)
        yield f"  {matched.option} {matched.pattern} matches {counted}{separator}"
        yield from (f"    {name}" for name in matched.names)
    for what, counts in (("cast", report.cast), ("dequantized", report.dequantized)):
        yield from (
            f"  {what}: {plural(count, 'tensor')} from {short_name(kind)}"
            for kind, count in counts.items()
        )
    if renamed := _count(report.renamed.tensors, report.renamed.values):
        yield f"  renamed: {renamed}"
    if report.unwrapped:
        prefixes = ", ".join(f"`{prefix}.`" for prefix in report.unwrapped)
        yield f"  names: {prefixes} removed"
    yield from (f"  excluded: {line}" for line in report.excluded)


def _count(tensors: int, values: int) -> str:
    """Return how many tensors and values there are; nothing if there are none."""
    counts = (tensors, "tensor"), (values, "value")
    return ", ".join(plural(count, noun) for count, noun in counts if count)


def show_part(report: TransferReport, part: Part) -> None:
    """Show what one part wrote, and the next step."""
    target = str(report.target)
    done = f"wrote part {part.number} of {part.of} of "
    after = "  once all parts are written, run the same command with --finish in place of --part"
    show_lines([[done, (target, "bold"), f": {_size_of(part)}"], [after]])


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
