"""Show what was saved of a damaged checkpoint, and what is lost."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from ckptool.commands.verify.salvage.salvage import SalvageReport
from ckptool.render.text import columns, console, emit, escaped, plural, size, visible

_SHOWN = 12


def show_salvage(report: SalvageReport) -> None:
    """What is wrong, what is lost and why, what cannot be known, then what was written."""
    screen = console()
    screen.print(f"[bold]{escaped(report.path)}[/]  {report.format}", soft_wrap=True)
    _show_lines(screen, "problems", report.problems)
    _show_lost(screen, report)
    _show_lines(screen, "unknown", report.unknown)
    _show_lines(screen, "notes", report.notes)
    if report.unproved:
        tensors = plural(report.unproved, "tensor")
        why = "complete, but changed values cannot be detected"
        _show_lines(screen, "no checksum", [f"{tensors}: {why}"])
    _show_end(screen, report)


def _show_lines(screen: Console, head: str, lines: Iterable[str]) -> None:
    shown = [line.partition("\n")[0] for line in lines]
    if not shown:
        return
    screen.print(f"\n[bold yellow]{head}[/]")
    for line in shown[:_SHOWN]:
        screen.print(f"  {escaped(line)}", soft_wrap=True)
    if len(shown) > _SHOWN:
        screen.print(f"  [dim]and {len(shown) - _SHOWN:,} more[/]")


def _show_lost(screen: Console, report: SalvageReport) -> None:
    if not report.lost:
        return
    screen.print("\n[bold red]lost[/]")
    rows = [
        [Text(visible(name), "bold"), Text(visible(_without_name(name, why)))]
        for name, why in list(report.lost.items())[:_SHOWN]
    ]
    emit(screen, columns(screen, rows, "ll", cuts=1))
    if len(report.lost) > _SHOWN:
        screen.print(f"  [dim]and {len(report.lost) - _SHOWN:,} more[/]")


def _without_name(name: str, why: str) -> str:
    return why.partition("\n")[0].removeprefix(f"{name}: ").removeprefix(f"{name} ")


def _show_end(screen: Console, report: SalvageReport) -> None:
    kept = f"{plural(report.tensors, 'tensor')}, {plural(report.values, 'value')}"
    kept += f", {size(report.nbytes)}"
    if report.complete:
        head = "[bold green]nothing lost[/]"
    elif report.lost:
        head = f"[bold red]{len(report.lost):,} lost[/]"
    else:
        head = "[bold yellow]all known names recovered[/]"
    screen.print(f"\n{head}", end="")
    target = escaped(report.target)
    screen.print(f"; wrote [bold]{target}[/] ({report.target_format}): {kept}", soft_wrap=True)
    screen.print(f"full list: {escaped(report.listing)}", soft_wrap=True)
