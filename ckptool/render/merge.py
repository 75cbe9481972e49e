"""The result or plan of a merge: what was written, and what each tensor is."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.text import Text

from ckptool.core.text import plural
from ckptool.render.convert import fold_names, show_convert
from ckptool.render.text import console, emit, visible

if TYPE_CHECKING:
    from ckptool.commands.merge import MergeReport


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
            lines += [Text(f"    {name}") for name in fold_names(of_text)]
    emit(console(), lines)
