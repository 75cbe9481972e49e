"""Keep a screen as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ckptool.errors import CannotDo, UsageError


def require_exportable(path: Path) -> None:
    """UsageError where the suffix of ``path`` is neither of SVG nor of HTML."""
    if path.suffix not in (".svg", ".html"):
        raise UsageError(f"--export {path}: the file must end in .svg or .html")


def write_export(screen: Console, path: Path) -> None:
    """Write what ``screen`` recorded as SVG or HTML, by the suffix of ``path``."""
    svg = path.suffix == ".svg"
    text = screen.export_svg(title="ckptool") if svg else screen.export_html(inline_styles=True)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotDo(f"{path}: cannot be written: {error.strerror}") from None
