"""``--html`` of the commands that show something: a page in addition to the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.inspect.report import InspectReport
    from ckptool.commands.inspect.stats import StatsReport


def require_page(html: str | None) -> Path | None:
    """Return the file of ``--html``, before anything is read or measured.

    Raises UsageError if it is not a file name on a disk, Unsupported if there can be no such
    folder, or the existing file is not a page of ckptool.
    """
    if html is None:
        return None
    from ckptool.render.html.page import MARK
    from ckptool.storage.disk import nearest_folder, require_marked

    example = "such as --html page.html"
    if html in ("", "-"):
        raise UsageError(f"--html {html!r}: a page needs the name of a file", hint=example)
    if "://" in html:
        raise UsageError(f"--html {html}: needs a local path, not a URL", hint=example)
    file = Path(html)
    if file.is_dir():
        raise UsageError(
            f"--html {html}: a folder, not a file", hint=f"--html {file / 'page.html'}"
        )
    nearest_folder(file.parent)
    require_marked(file, MARK, noun="page that ckptool wrote")
    return file


def write_page(
    file: Path | None, content: Callable[[], Mapping[str, Any]], *, quiet: bool = False
) -> None:
    """Write the page of a report's ``to_dict``, if requested."""
    if file is not None:
        from ckptool.render.html.page import page

        _write(file, page(content()), quiet=quiet)


def write_inspect_page(file: Path | None, report: InspectReport, stats: StatsReport | None) -> None:
    """Write the page of a checkpoint, if requested, with the statistics that were read."""
    if file is not None:
        from ckptool.render.html.page import inspect_page

        _write(file, inspect_page(report, stats), quiet=False)


def _write(file: Path, content: bytes, *, quiet: bool) -> None:
    """Write a page; a rename replaces an earlier one."""
    from ckptool.core.text import size
    from ckptool.render.html.page import MARK
    from ckptool.render.messages import show_step
    from ckptool.storage.disk import write_whole

    write_whole(file, content, mark=MARK)
    if not quiet:
        show_step(f"wrote {file} ({size(len(content))})")
