"""The steps of a run, one per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ckptool.core.mesh import Mesh
from ckptool.core.text import list_some, plural, size, visible
from ckptool.render.text import Cell, columns

if TYPE_CHECKING:
    from ckptool.commands.inspect.steps import RunSummary, StepSummary

_HEADS = ("step", "checkpoint", "saved", "file bytes", "", "optimizer", "mesh")
ROOMY = 78
_NARROW = 66


def steps_lines(run: RunSummary, screen: Console) -> list[Text]:
    """Return a row per step, newest first, followed by the reason if it is incomplete.

    Checkpoints without a step's number, such as the parts of a pipeline, are not called steps.
    """
    good = sum(step.complete for step in run.steps)
    numbered = any(step.number is not None for step in run.steps)
    count = plural(len(run.steps), "step" if numbered else "checkpoint")
    title = Text.assemble((visible(str(run.path)), "bold"), f"  {count}, ")
    title.append(f"{good:,} complete", "green" if good == len(run.steps) else "yellow")
    brief = screen.is_terminal and screen.width < ROOMY
    first = 0 if numbered else 1
    rows = [_row(step, run, brief, screen.width)[first:] for step in run.steps]
    shown = _HEADS[first:][: len(rows[0])]
    sides = "rllrlll"[first:][: len(shown)]
    heads, *lines = columns(screen, rows, sides, heads=shown, cuts=1 - first)
    result = [title, Text(), heads]
    for step, line in zip(run.steps, lines, strict=True):
        result.append(line)
        result += [Text(f"      {part}", "dim") for part in _wrap(step.reasons, screen)]
    remarks = [f"{s.pointer} points to {_name(s, run)}" for s in run.steps if s.pointer is not None]
    remarks += [f"{file} names {other}, which is not there" for file, other in run.dangling.items()]
    if run.mentions:
        remarks.append(f"steps are also named in {list_some(run.mentions, 3)}")
    result += [Text(), *(Text(f"  {visible(line)}") for line in remarks)] if remarks else []
    last = next((step for step in run.steps if step.complete), None)
    if last is None:
        return result
    result.append(Text())
    if numbered:
        latest = f"  ckptool verify {visible(str(run.path))} --latest-good  # reads the data, too"
        result.append(Text(latest, "dim"))
    inner = run.parts or (last.path,)
    return [*result, *(Text(f"  ckptool inspect {visible(str(path))}", "dim") for path in inner)]


def _wrap(reasons: Iterable[str], screen: Console) -> Iterator[str]:
    """Yield reasons as lines that fit the screen after their indent."""
    for reason in map(visible, reasons):
        yield from wrap(reason, max(20, screen.width - 7)) if screen.is_terminal else [reason]


def _row(step: StepSummary, run: RunSummary, brief: bool, width: int) -> list[Cell]:
    how = "%Y-%m-%d %H:%M" if not brief else "%m-%d %H:%M" if width >= _NARROW else "%m-%d"
    saved = "" if step.saved is None else step.saved.astimezone().strftime(how)
    row: list[Cell] = [
        "" if step.number is None else str(step.number),
        (_name(step, run), "bold"),
        (saved, "dim"),
        size(step.nbytes),
        _state(step),
        "yes" if step.optimizer else "-",
    ]
    return row if brief else [*row, _mesh(step.mesh, step.ranks)]


def _state(step: StepSummary) -> Cell:
    if step.unread:
        return "not read", "yellow"
    return ("complete", "green") if step.complete else ("INCOMPLETE", "red")


def _name(step: StepSummary, run: RunSummary) -> str:
    return step.path.name if step.path == run.path else str(step.path).removeprefix(f"{run.path}/")


def _mesh(mesh: Mesh | None, ranks: int | None) -> str:
    if mesh is None:
        return "-" if ranks is None else plural(ranks, "rank")
    return mesh.words
