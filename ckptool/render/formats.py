"""The tables of formats and of the key maps that come with ckptool."""

from __future__ import annotations

import re
import sys
from typing import Any

from ckptool.commands.document import document
from ckptool.commands.keymap.check import MapCheck
from ckptool.commands.keymap.library import builtin_maps, map_text
from ckptool.core.text import plural
from ckptool.formats import list_formats
from ckptool.render.messages import say
from ckptool.render.text import Cell, columns, console, emit


def show_formats() -> None:
    """Show a row per format: its name, what reads and writes it, and what it is."""
    heads = ("format", "read", "convert", "reshard", "description")
    rows = [
        [(str(name), "bold"), *("yes" if mark else "-" for mark in marks), str(summary)]
        for name, *marks, summary in list_formats()
    ]
    screen = console()
    emit(screen, columns(screen, rows, "lllll", heads=heads))


def formats_json() -> dict[str, Any]:
    """Return the table as ``ckptool.formats/2``."""
    rows = [row._asdict() for row in list_formats()]
    return document("formats", formats=rows)


def show_maps() -> None:
    """Show a row per map: its name, and what it maps."""
    rows: list[list[Cell]] = []
    for keymap in builtin_maps().values():
        sizes = keymap.sizes.items()
        # those that are looked up, neither fixed nor computed
        dims = [dim for dim, keys in sizes if keys and re.fullmatch("[a-z_]+", str(keys[0]))]
        rows.append([(keymap.name, "bold"), ", ".join(dims), keymap.summary])
    screen = console()
    emit(screen, columns(screen, rows, "lll", heads=("map", "dims", "description")))


def show_map(name: str) -> None:
    """Print the TOML of a map, as it is."""
    sys.stdout.write(map_text(name))


def show_map_check(report: MapCheck) -> None:
    """Show names without a rule, rules without a match, and why a map cannot be applied.

    Of the rules without a match only those similar to such a name are listed.
    """
    out = console()
    near = [rule for rule in report.rules if rule.nearest]
    names = ("unmatched name", "count", "nearest rule"), report.names
    rules = ("unmatched rule", "", "nearest name"), near
    for number, (heads, entries) in enumerate(table for table in (names, rules) if table[1]):
        if number:
            say()
        rows = [(e.name, f"{e.count:,}" if e.count else "", e.nearest or "-") for e in entries]
        emit(out, columns(out, rows, "lrl", heads=heads))
    if rest := len(report.rules) - len(near):
        say(f"{plural(rest, 'more rule' if near else 'rule')} matched no tensor")
    way = f"{report.map} ({report.source} to {report.target})"
    summary = f"matches {report.matched:,} of {plural(report.tensors, 'tensor')}"
    summary += ", but cannot be applied" if report.problem else ""
    say(f"{'OK' if report.ok else 'FAILED'}: {way} {summary}")
    if report.problem:
        say(report.problem)
    if report.hint:
        say(f"hint: {report.hint}")


def maps_json(name: str | None) -> dict[str, Any]:
    """Return the maps as ``ckptool.maps/2``; with ``name`` just that one, with its text."""
    chosen = builtin_maps() if name is None else {name: builtin_maps().get(name)}
    texts = {} if name is None else {"toml": map_text(name)}
    rows = [
        {"name": m.name, "summary": m.summary, "from": m.source, "to": m.target, **texts}
        for m in chosen.values()
        if m is not None
    ]
    return document("maps", maps=rows)
