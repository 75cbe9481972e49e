"""Show how one checkpoint differs from another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.verify.against import AgainstReport, DifferingTensor, Holder
from ckptool.commands.verify.findings import Finding
from ckptool.render.text import columns, console, emit, escaped, size, visible
from ckptool.render.verify import verify_json

_MOST_SHOWN = 12
_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


def show_against(report: AgainstReport, *, quiet: bool = False) -> None:
    """What differs in structure, then the tensors whose values differ, then the one sentence."""
    screen = console()
    if not quiet:
        _show_heads(report, screen)
        _show_findings(report.verify.findings, screen)
        _show_differing(report.differing, screen)
    colour = "green" if report.verify.sound else "red"
    screen.print(f"[bold {colour}]{escaped(report.verify.sentence)}[/]", soft_wrap=True)


def _show_heads(report: AgainstReport, screen: Console) -> None:
    """The two that are compared, and how much of them."""
    sides = (
        ("here", report.verify.path, report.verify.format),
        ("there", report.other, report.other_format),
    )
    rows = [
        [Text(where, "dim"), Text(visible(str(path)), "bold"), Text(name or "not readable")]
        for where, path, name in sides
    ]
    emit(screen, columns(screen, rows, "lll"))
    screen.print(f"  compared {report.tensors:,} tensors, {size(report.nbytes)} a side\n")


def _show_findings(findings: Iterable[Finding], screen: Console) -> None:
    """What is no difference of values, a dozen of each kind."""
    others = [finding for finding in findings if finding.code != "tensor-differs"]
    for _, members in groupby(others, lambda finding: finding.code):
        group = list(members)
        for finding in group[:_MOST_SHOWN]:
            word = finding.severity.value
            message = f"[{_COLOURS[word]}]{word}[/] {finding.code}: {escaped(finding.message)}"
            screen.print(message, soft_wrap=True)
        if len(group) > _MOST_SHOWN:
            screen.print(f"  ... and {len(group) - _MOST_SHOWN:,} more of these; --json has all")
        hint = next((finding.hint for finding in group if finding.hint), None)
        if hint:
            screen.print(f"[bold cyan]hint:[/] {escaped(hint)}", soft_wrap=True)


def _show_differing(tensors: tuple[DifferingTensor, ...], screen: Console) -> None:
    if not tensors:
        return
    heads = ("tensor", "differ", "of", "largest", "first at", "here", "there")
    rows = [[Text(head, "dim") for head in heads]]
    rows += [_row(tensor) for tensor in tensors[:_MOST_SHOWN]]
    emit(screen, columns(screen, rows, "lrrrlll", cuts=0))
    if len(tensors) > _MOST_SHOWN:
        screen.print(f"  ... and {len(tensors) - _MOST_SHOWN:,} more; --json has all")
    screen.print()


def _row(tensor: DifferingTensor) -> list[Text]:
    found = tensor.difference
    largest = "" if found.largest is None else f"{found.largest:.3g}"
    held = [
        Text(f"{value}  ").append(_told(holder), "dim")
        for value, holder in zip(found.values, tensor.holders, strict=True)
    ]
    return [
        Text(visible(tensor.name), "bold"),
        Text(f"{found.elements:,}", "red"),
        Text(f"{tensor.elements:,}"),
        Text(largest),
        Text(str(list(found.first))),
        *held,
    ]


def _told(holder: Holder) -> str:
    rank = "" if holder.rank is None else f"rank {holder.rank}, "
    return rank + visible(holder.file)


def against_json(report: AgainstReport) -> dict[str, Any]:
    """The report as ``ckptool.verify/1``, with what was compared under ``against``."""
    return verify_json(report.verify) | {
        "against": {
            "path": str(report.other),
            "format": report.other_format,
            "tensors_compared": report.tensors,
            "values_compared": report.values,
            "bytes_compared": report.nbytes,
            "differing": [_tensor_json(tensor) for tensor in report.differing],
        }
    }


def _tensor_json(tensor: DifferingTensor) -> dict[str, Any]:
    found = tensor.difference
    largest = found.largest
    sides = zip(("here", "there"), found.values, tensor.holders, strict=True)
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
