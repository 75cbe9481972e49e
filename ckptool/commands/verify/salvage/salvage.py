"""Write what is intact of a damaged checkpoint, and list what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ckptool.commands.document import document
from ckptool.commands.open import OpenedCheckpoint, survey
from ckptool.commands.options.verify import SalvageOptions
from ckptool.commands.transfer import (
    Progress,
    Transfer,
    require_apart,
    resolve_target,
    target_notes,
)
from ckptool.commands.verify.salvage.intact import find_intact
from ckptool.commands.verify.salvage.repair import rebuild
from ckptool.core.plan import Plan
from ckptool.engine.write.stage import RESUME_HINT
from ckptool.errors import Committed, NotFound, TransferError, Unsupported
from ckptool.formats import FORMATS, single_file_suffixes
from ckptool.formats.base import Request
from ckptool.storage.disk import require_marked, write_whole
from ckptool.storage.url import Location

_AFRESH = "run the same command again"
_AGAIN = "run the same command with --overwrite"
_MARK = b'{\n "schema": "ckptool.salvage/'


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What is intact, and what is lost of the checkpoint at ``path``.

    ``lost`` maps names to why; ``problems`` are what else is wrong with the source, ``unknown``
    what no file says any more, ``notes`` what the target holds otherwise or not. ``unproved`` of
    the tensors lie in bytes for which no checksum is stored. ``nbytes`` were written; ``listing``
    is the file beside the target that says all of this.
    """

    computed: ClassVar = ("complete",)

    path: str
    format: str
    target: str
    target_format: str
    tensors: int
    values: int
    nbytes: int
    unproved: int
    lost: Mapping[str, str]
    problems: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    listing: str

    @property
    def complete(self) -> bool:
        """Return whether nothing is lost, as far as can be known."""
        left = any(note.startswith("not carried") for note in self.notes)
        return not (self.lost or self.problems or self.unknown or left)


@dataclass(frozen=True, slots=True)
class Salvage:
    """The plan to write what is intact of a damaged checkpoint."""

    transfer: Transfer
    report: SalvageReport
    listing: Location

    @property
    def nbytes(self) -> int:
        """Return the bytes that ``run`` writes."""
        return self.transfer.nbytes

    def run(self, progress: Progress = lambda nbytes: None) -> SalvageReport:
        """Write the target, whole or not at all, then the list beside it."""
        earlier = EarlierList(self.listing)
        late: Committed | None = None
        notes: tuple[str, ...] = ()
        try:
            notes = replace(self.transfer, before_commit=earlier.put_away).run(progress)
        except Committed as error:
            late = error
        except TransferError as error:
            message = f"{error.message}{earlier.put_back()}"
            hint = _AFRESH if error.hint == RESUME_HINT else error.hint
            raise type(error)(message, hint=hint) from error
        except BaseException:
            earlier.put_back()
            raise
        try:
            self._write_list()
            earlier.remove()
        except (Unsupported, NotFound, OSError) as error:
            message = f"{error}; {self.report.target}: the new one is complete"
            raise Committed(message, hint=_AGAIN) from None
        if late is not None:
            raise Committed(late.message, hint=_AGAIN) from late
        return replace(self.report, notes=(*self.report.notes, *notes))

    def _write_list(self) -> None:
        content = json.dumps(salvage_content(self.report), indent=1) + "\n"
        if isinstance(self.listing, Path):
            write_whole(self.listing, content.encode(), mark=_MARK)
        else:
            self.listing.write_bytes(content.encode())


class EarlierList:
    """The list of what stood at the target before: it never stands beside another's target.

    It is renamed away just before the commit, and back where that fails.
    """

    def __init__(self, listing: Location) -> None:
        self._listing = listing if isinstance(listing, Path) else None
        self._aside = Path(f"{listing}").with_name(f".{listing.name}.replaced")
        self._is_away = False
        if self._listing is not None:
            require_marked(self._aside, _MARK, noun="list of a salvage")

    def put_away(self) -> None:
        """Rename the list away, where there is one."""
        if self._listing is not None and os.path.lexists(self._listing):
            os.replace(self._listing, self._aside)
            self._is_away = True

    def put_back(self) -> str:
        """Undo ``put_away``; what to add to a message where that fails."""
        if self._listing is not None and self._is_away:
            try:
                os.replace(self._aside, self._listing)
            except OSError:
                return f"; the list {self._listing} is now {self._aside}"
        return ""

    def remove(self) -> None:
        """Remove what was renamed away, also by a run that was killed."""
        if self._listing is not None:
            self._aside.unlink(missing_ok=True)


def plan_salvage(path: Location, target: Location, options: SalvageOptions) -> Salvage:
    """Read a damaged checkpoint as far as it can be, and plan to write what is intact of it.

    Raises NotFound or Unrecognised where there is no checkpoint, Unsupported where nothing in it is
    intact or the target cannot be written. The source is only read.
    """
    target = resolve_target(target)
    surveyed = survey(path, options.read)
    recovery = rebuild(surveyed, options.read)
    opened = OpenedCheckpoint(surveyed.path, surveyed.source, surveyed.format, recovery.catalog)
    require_apart(opened, target)
    listing = target.with_name(f"{target.name}.salvage.json")
    if listing.exists() and not options.transfer.overwrite:
        raise Unsupported(f"{listing} already exists", hint="--overwrite replaces it")
    if isinstance(listing, Path):
        require_marked(listing, _MARK, noun="list of a salvage")
    workers = options.transfer.run.workers or opened.source.workers
    intact = find_intact(opened, recovery.problems, workers)
    catalog = intact.catalog
    if not catalog.tensors and not catalog.objects:
        raise Unsupported(
            f"{surveyed.path}: nothing in it can be recovered",
            hint=f"run: ckptool verify {surveyed.path}",
        )
    writer = single_file_suffixes().get(target.suffix, FORMATS["dcp"])
    layout = writer.lay_out(catalog, Request(target.name))
    report = SalvageReport(
        path=str(surveyed.path),
        format=surveyed.format.name,
        target=str(target),
        target_format=writer.name,
        tensors=len(catalog.tensors),
        values=len(catalog.objects),
        nbytes=layout.nbytes,
        unproved=intact.unproved,
        lost=intact.lost,
        problems=tuple(str(p) for p in recovery.problems if p.tensor not in intact.lost),
        unknown=recovery.unknown,
        notes=(*layout.notes, *target_notes(opened, target, layout, options.transfer)),
        listing=str(listing),
    )
    transfer = Transfer(opened, Plan(catalog, layout), target, options.transfer, "salvage")
    return Salvage(transfer, report, listing)


def salvage_content(report: SalvageReport) -> dict[str, Any]:
    """Return the report as ``ckptool.salvage/2``."""
    return document("salvage", report)
