"""Show how one checkpoint differs from another."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.verify.compare.against import SIDES, AgainstReport, DifferingTensor
from ckptool.commands.verify.compare.coverage import Amount, Coverage
from ckptool.render.text import columns, console, emit, plural, size, visible
from ckptool.render.verify.report import show_findings, show_sentence, verify_json

_MOST_SHOWN = 12


def show_against(report: AgainstReport) -> None:
    """What differs in structure, then the tensors whose values differ, then the one sentence."""
    screen = console()
    _show_heads(report, screen)
    others = [one for one in report.verify.findings if one.code != "tensor-differs"]
    show_findings(others, screen)
    _show_differing(report.differing, screen)
    show_sentence(report.verify, screen)


def _show_heads(report: AgainstReport, screen: Console) -> None:
    """The two that are compared, and how much of them."""
    paths = report.verify.path, report.other
    formats = report.verify.format, report.other_format
    covered = report.coverage or (None, None)
    rows = [
        [
            Text(where, "dim"),
            Text(visible(str(path)), "bold"),
            Text(name or "not readable"),
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
    """The report as ``ckptool.verify/1``, with what was compared under ``against``."""
    return verify_json(report.verify) | {
        "against": {
            "path": str(report.other),
            "format": report.other_format,
            "tensors_compared": report.verify.tensors,
            "values_compared": report.values,
            "coverage": _coverage_json(report),
            "differing": [_tensor_json(tensor) for tensor in report.differing],
        }
    }


def _coverage_json(report: AgainstReport) -> dict[str, Any] | None:
    """What was compared of all that either side holds."""
    if report.coverage is None:
        return None
    return {
        where: {"compared": _amount_json(one.compared), "total": _amount_json(one.total)}
        for where, one in zip(SIDES, report.coverage, strict=True)
    }


def _amount_json(amount: Amount) -> dict[str, int]:
    return {"tensors": amount.tensors, "bytes": amount.nbytes, "values": amount.values}


def _tensor_json(tensor: DifferingTensor) -> dict[str, Any]:
    found = tensor.difference
    largest = found.largest
    sides = zip(SIDES, found.values, tensor.holders, strict=True)
    return {
        "tensor": tensor.name,
        "shape": list(tensor.shape),
        "elements": tensor.elements,
        "differing": found.elements,
        "first": list(found.first),
        "largest": str(largest) if largest is not None and math.isinf(largest) else largest,
    } | {
        where: {"value": value, "rank": holder.rank, "file": holder.file}
        for where, value, holder in sides
    }
