"""Keep a screen as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ckptool.errors import UsageError

_HTML = b'<!DOCTYPE html>\n<html>\n<head>\n<meta charset="UTF-8">\n<style>\n'


def require_exportable(path: Path) -> None:
    """UsageError where the suffix of ``path`` is neither of SVG nor of HTML."""
    if path.suffix not in (".svg", ".html"):
        raise UsageError(f"--export {path}: the file must end in .svg or .html")


def exported(screen: Console, path: Path) -> bytes:
    """Return what ``screen`` recorded as SVG or HTML, by the suffix of ``path``."""
    svg = path.suffix == ".svg"
    text = screen.export_svg(title="ckptool") if svg else screen.export_html(inline_styles=True)
    return text.encode()


def export_mark(path: Path) -> bytes:
    """Return how every export begins that has the suffix of ``path``."""
    return b'<svg class="rich-terminal"' if path.suffix == ".svg" else _HTML
