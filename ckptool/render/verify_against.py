"""Show how one checkpoint differs from another."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.verify.against import AgainstReport, DifferingTensor
from ckptool.render.text import columns, console, emit, plural, size, visible
from ckptool.render.verify import show_findings, show_sentence, verify_json

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
    sides = (
        ("here", report.verify.path, report.verify.format),
        ("there", report.other, report.other_format),
    )
    rows = [
        [Text(where, "dim"), Text(visible(str(path)), "bold"), Text(name or "not readable")]
        for where, path, name in sides
    ]
    emit(screen, columns(screen, rows, "lll"))
    compared = f"{plural(report.verify.tensors, 'tensor')} compared"
    emit(screen, [Text(f"  {compared}, {size(report.verify.nbytes)} read", "dim")])


def _show_differing(tensors: tuple[DifferingTensor, ...], screen: Console) -> None:
    if not tensors:
        return
    screen.print()
    heads = ("tensor", "differ", "of", "largest", "first at", "here", "there")
    rows = [[Text(head, "dim") for head in heads]]
    rows += [_row(tensor) for tensor in tensors[:_MOST_SHOWN]]
    emit(screen, columns(screen, rows, "lrrrlll", cuts=0))
    if len(tensors) > _MOST_SHOWN:
        screen.print(f"  ... and {len(tensors) - _MOST_SHOWN:,} more; --json lists all")


def _row(tensor: DifferingTensor) -> list[Text]:
    found = tensor.difference
    largest = "" if found.largest is None else f"{found.largest:.3g}"
    held = [
        Text(f"{value}  ").append(visible(str(holder)), "dim")
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


def against_json(report: AgainstReport) -> dict[str, Any]:
    """The report as ``ckptool.verify/1``, with what was compared under ``against``."""
    return verify_json(report.verify) | {
        "against": {
            "path": str(report.other),
            "format": report.other_format,
            "tensors_compared": report.verify.tensors,
            "values_compared": report.values,
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
