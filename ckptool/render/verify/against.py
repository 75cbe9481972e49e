"""Show how one checkpoint differs from another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.document import document, plain
from ckptool.commands.verify.compare.against import SIDES, AgainstReport, DifferingTensor
from ckptool.commands.verify.compare.coverage import Coverage
from ckptool.render.text import columns, console, emit, plural, size, visible
from ckptool.render.verify.report import show_findings, show_summary

_MOST_SHOWN = 12


def show_against(report: AgainstReport) -> None:
    """What differs in structure, then the tensors whose values differ, then the one sentence."""
    screen = console()
    _show_heads(report, screen)
    others = [one for one in report.verify.findings if one.code != "tensor-differs"]
    show_findings(others, screen)
    _show_differing(report.differing, screen)
    show_summary(report.verify, screen)


def _show_heads(report: AgainstReport, screen: Console) -> None:
    """The two that are compared, and how much of them."""
    paths = report.verify.path, report.other
    formats = report.verify.format, report.other_format
    covered = report.coverage or (None, None)
    rows = [
        [
            Text(where, "dim"),
            Text(visible(str(path)), "bold"),
            Text(name or "cannot be read"),
            Text(_of_all(coverage), "dim"),
        ]
        for where, path, name, coverage in zip(SIDES, paths, formats, covered, strict=True)
    ]
    emit(screen, columns(screen, rows, "llll"))


def _of_all(coverage: Coverage | None) -> str:
    """Such as ``34 of 136 tensors, 8.13 MiB of 24.4 MiB, 0 of 16 values compared``."""
    if coverage is None:
        return ""
    one, all_of = coverage.compared, coverage.total
    told = f"{one.tensors:,} of {plural(all_of.tensors, 'tensor')}"
    told += f", {size(one.nbytes)} of {size(all_of.nbytes)}"
    values = f", {one.values:,} of {plural(all_of.values, 'value')}" if all_of.values else ""
    return f"{told}{values} compared"


def _show_differing(tensors: tuple[DifferingTensor, ...], screen: Console) -> None:
    """A line a tensor, then what either side holds at the first differing element, and where."""
    if not tensors:
        return
    heads = [Text(head, "dim") for head in ("tensor", "differ", "of", "largest", "first at")]
    shown = tensors[:_MOST_SHOWN]
    head, *lines = columns(screen, [heads, *map(_row, shown)], "lrrrl", cuts=0)
    emit(screen, [Text(), head])
    for tensor, line in zip(shown, lines, strict=True):
        emit(screen, [line, *columns(screen, _held(tensor), "lll")])
    if len(tensors) > _MOST_SHOWN:
        screen.print(f"  [dim]and {len(tensors) - _MOST_SHOWN:,} more; --json lists all[/]")


def _row(tensor: DifferingTensor) -> list[Text]:
    found = tensor.difference
    return [
        Text(visible(tensor.name), "bold"),
        Text(f"{found.elements:,}", "red"),
        Text(f"{tensor.elements:,}"),
        Text("" if found.largest is None else f"{found.largest:.3g}"),
        Text(str(list(found.first))),
    ]


def _held(tensor: DifferingTensor) -> list[list[Text]]:
    sides = zip(SIDES, tensor.difference.values, tensor.holders, strict=True)
    return [
        [Text(f"  {where}", "dim"), Text(value), Text(visible(str(holder)), "dim")]
        for where, value, holder in sides
    ]


def against_json(report: AgainstReport) -> dict[str, Any]:
    """Return the report as ``ckptool.verify/2``, with what was compared under ``against``.

    What is of either side is under ``a`` and ``b``.
    """
    compared = plain(report) | {"tensors_compared": report.verify.tensors}
    compared["coverage"] = report.coverage and _of_sides(report.coverage)
    compared["differing"] = [_tensor_json(tensor) for tensor in report.differing]
    return document("verify", report.verify, against=compared)


def _tensor_json(tensor: DifferingTensor) -> dict[str, Any]:
    found = tensor.difference
    sides = zip(found.values, tensor.holders, strict=True)
    return {
        "tensor": tensor.name,
        "shape": tensor.shape,
        "elements": tensor.elements,
        "differing": found.elements,
        "first": found.first,
        "largest": found.largest,
    } | _of_sides([{"value": value} | plain(holder) for value, holder in sides])


def _of_sides(sides: Sequence[object]) -> dict[str, Any]:
    return dict(zip(map(str.lower, SIDES), map(plain, sides), strict=True))
