"""Tensors in full, and non-tensor values, one a line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.text import Text

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.rewrite import matches
from ckptool.errors import UsageError
from ckptool.formats._values import type_name
from ckptool.render.fold import natural
from ckptool.render.text import columns, plural, visible
from ckptool.render.values import preview

_HEADINGS = ("name", "dtype", "shape", "placements", "chunks", "bytes")
_LONGEST_VALUE = 200


def tensor_lines(catalog: Catalog, globs: Sequence[str], screen: Console) -> list[Text]:
    """Every tensor that matches, in natural order. UsageError where a glob matches none."""
    found = sorted(matching(catalog, globs), key=natural)
    rows = [[Text(heading, style="dim") for heading in _HEADINGS]]
    rows += [_tensor(catalog.tensors[name]) for name in found]
    return columns(screen, rows, "llllrr", cuts=0)


def matching(catalog: Catalog, globs: Sequence[str]) -> list[str]:
    """The names of tensors that match; UsageError where a glob matches none."""
    for glob in globs:
        if not any(matches(name, [glob]) for name in catalog.tensors):
            raise no_such_tensor(f"--tensors {glob!r} matches no tensor", glob, catalog)
    return [name for name in catalog.tensors if matches(name, globs)]


def tensor_named(catalog: Catalog, name: str) -> TensorEntry:
    """The tensor that ``--map`` asks for; UsageError where there is no such one."""
    entry = catalog.tensors.get(name)
    if entry is None:
        raise no_such_tensor(f"--map {name!r}: no such tensor", name, catalog)
    return entry


def _tensor(entry: TensorEntry) -> list[Text]:
    placements = "-" if entry.placements is None else ", ".join(map(str, entry.placements))
    return [
        Text(visible(entry.name)),
        Text(entry.dtype.name, style="yellow"),
        Text(str(list(entry.shape)), style="green"),
        Text(placements, style="magenta"),
        Text(f"{len(entry.chunks):,}"),
        Text(f"{entry.nbytes:,}"),
    ]


def no_such_tensor(message: str, asked: str, catalog: Catalog) -> UsageError:
    """An error that offers the names most like the one that was asked for."""
    if asked in catalog.objects:
        return UsageError(f"{message}: it is no tensor", hint="--values shows it")
    close = closest(asked, catalog.tensors)
    if not close:
        return UsageError(message, hint="--tensors '*' lists all names")
    return UsageError(message, hint="did you mean " + " or ".join(map(visible, close)) + " ?")


def closest(asked: str, names: Collection[str]) -> list[str]:
    """Up to three names most like ``asked``, those that contain all its steps first."""
    steps = [step for step in re.split(r"[.*{}]+", asked) if step]
    inside = sorted((name for name in names if all(step in name for step in steps)), key=len)
    if steps and inside:
        return inside[:3]
    return difflib.get_close_matches(asked, list(names)[:20_000], n=3, cutoff=0.5)


def value_lines(catalog: Catalog, screen: Console) -> list[Text]:
    """Every non-tensor value with its type, in natural order."""
    if not catalog.objects:
        return [Text("  no values besides tensors", style="dim")]
    rows = [
        [
            Text(visible(name)),
            Text(visible(type_name(catalog.objects[name].value)), style="yellow"),
            Text(preview(catalog.objects[name].value, _LONGEST_VALUE), style="cyan"),
        ]
        for name in sorted(catalog.objects, key=natural)
    ]
    title = Text(f"  {plural(len(rows), 'value')} besides tensors", style="bold")
    return [title, *columns(screen, rows, "lll", cuts=2)]
