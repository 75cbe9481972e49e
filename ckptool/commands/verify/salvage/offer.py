"""Say how much a salvage would keep of a damaged checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING

from ckptool.core.text import plural
from ckptool.errors import CkptoolError, Damaged

if TYPE_CHECKING:
    from ckptool.commands.options.read import ReadOptions
    from ckptool.commands.verify.findings import VerifyReport
    from ckptool.storage.url import Location

_CUT = frozenset(["file-truncated", "zip-structure"])
"""The codes of files of which the beginning may be intact."""


def salvage_offer(report: VerifyReport, names: Collection[str] = ()) -> str | None:
    """Return the command that writes what is intact, and how much that is at most.

    None if that is all or nothing. ``names`` are lost, too, besides those that the report names.
    Of a file whose end is lost, and with it the list of tensors, nobody knows how much it is.
    """
    command = f"ckptool verify {quote(str(report.path))} --salvage DST"
    if not report.tensors and any(finding.code in _CUT for finding in report.findings):
        return f"`{command}` writes the tensors that are intact, if there are any"
    intact = report.tensors - len({*report.lost, *names})
    if not 0 < intact < report.tensors:
        return None
    most = f"at most {intact:,} of {plural(report.tensors, 'tensor')}"
    return f"`{command}` writes what is intact: {most}"


@contextmanager
def offering_salvage(path: Location, read: ReadOptions) -> Iterator[None]:
    """Add to the error for a damaged source what a salvage would keep of it.

    Only its metadata is read for that.
    """
    try:
        yield
    except Damaged as error:
        from ckptool.commands.verify.codes import next_step

        names = {problem.tensor for problem in error.problems if problem.tensor}
        if offer := _offer(path, read, names):
            error.hint = next_step(error)
            error.add_hint(offer)
        raise


def _offer(path: Location, read: ReadOptions, names: Collection[str]) -> str | None:
    """Return the offer for a checkpoint without these names; None if it cannot be examined."""
    from ckptool.commands.options.verify import VerifyOptions
    from ckptool.commands.verify.verify import verify

    try:
        return salvage_offer(verify(path, VerifyOptions(read=read, quick=True)), names)
    except (CkptoolError, OSError):
        return None
