"""Write what is intact of a damaged checkpoint, and list what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from msgspec import field

from ckptool.commands.document import Report
from ckptool.commands.model.links import require_own_files
from ckptool.commands.open import OpenedCheckpoint, survey
from ckptool.commands.options.verify import SalvageOptions
from ckptool.commands.transfer.report import target_notes
from ckptool.commands.transfer.target import require_apart, resolve_target
from ckptool.commands.transfer.transfer import Transfer
from ckptool.commands.verify.salvage.intact import find_intact
from ckptool.commands.verify.salvage.repair import rebuild
from ckptool.core.planning.plan import Plan
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.ranks import Ranks
from ckptool.engine.write.stage import RESUME_HINT, RESUME_OVERWRITE
from ckptool.errors import Committed, NotFound, TransferError, Unsupported
from ckptool.formats import FORMATS, single_file_suffixes
from ckptool.formats.base import Request
from ckptool.serialization.safetensors_metadata import note_lost
from ckptool.storage.disk import require_marked
from ckptool.storage.place import on_disk, write_file
from ckptool.storage.url import Location

_AFRESH = "run the same command again"
_AGAIN = "run the same command with --overwrite"
_MARK = b'{\n "schema": "ckptool.salvage/'


class SalvageReport(Report, frozen=True):
    """What is intact and what is lost of the checkpoint at ``path``; true if nothing is lost.

    ``lost`` maps names to why; ``problems`` are other problems of the source, ``unknown`` what no
    file records any more, ``notes`` remarks on the target. ``unproved`` counts tensors in bytes for
    which no checksum is stored. ``nbytes`` were written; ``listing`` is the file beside the target
    that says all of this.
    """

    computed: ClassVar = ("complete",)

    path: str
    format: str
    target: str
    target_format: str
    tensors: int = field(name="totals.tensors")
    values: int = field(name="totals.values")
    nbytes: int
    unproved: int
    lost: Mapping[str, str]
    problems: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    listing: str

    schema: ClassVar = "salvage"

    def __bool__(self) -> bool:
        return self.complete

    @property
    def complete(self) -> bool:
        """Return whether nothing is lost, as far as can be known."""
        left = any(note.startswith("not carried") for note in self.notes)
        return not (self.lost or self.problems or self.unknown or left)


class Salvage(Transfer[SalvageReport], frozen=True, kw_only=True):
    """The plan to write what is intact of a damaged checkpoint, and the list beside it."""

    listing: Listing

    def run(self, progress: Progress = UNWATCHED, ranks: Ranks | None = None) -> SalvageReport:
        """Write the target, completely or not at all, then the list beside it."""
        late: Committed | None = None
        report = self.report
        try:
            report = Transfer.run(self, progress, ranks)
        except Committed as error:
            late = error
        except TransferError as error:
            message = f"{error.message}{self.listing.put_back()}"
            hint = _AFRESH if error.hint in (RESUME_HINT, RESUME_OVERWRITE) else error.hint
            raise type(error)(message, hint=hint) from error
        except BaseException:
            self.listing.put_back()
            raise
        try:
            self.listing.write(self.report)
        except (Unsupported, NotFound, OSError) as error:
            message = f"{error}; {self.report.target}: the new one is complete"
            raise Committed(message, hint=_AGAIN) from None
        if late is not None:
            raise Committed(late.message, hint=_AGAIN) from late
        return report

    def before_commit(self) -> None:
        """Move away the list of the checkpoint that was at the target before."""
        self.listing.put_away()


class Listing:
    """The list of what is lost, beside the target; it is never beside another's output.

    An earlier list is renamed just before the commit, and back if that fails. Raises Unsupported if
    another file is in the place of either.
    """

    def __init__(self, place: Location) -> None:
        self._place = place
        self._disk = on_disk(place)
        self._aside = Path(f"{place}").with_name(f".{place.name}.replaced")
        self._is_away = False
        if self._disk is not None:
            require_marked(self._disk, _MARK, noun="list of a salvage")
            require_marked(self._aside, _MARK, noun="list of a salvage")

    def put_away(self) -> None:
        """Rename an earlier list, if there is one."""
        if self._disk is not None and os.path.lexists(self._disk):
            os.replace(self._disk, self._aside)
            self._is_away = True

    def put_back(self) -> str:
        """Undo ``put_away``; return what to add to a message if that fails."""
        if self._is_away:
            try:
                os.replace(self._aside, str(self._place))
            except OSError:
                return f"; the list {self._place} is now {self._aside}"
        return ""

    def write(self, report: SalvageReport) -> None:
        """Write the list, and remove a renamed earlier one, even one that a killed run left."""
        content = json.dumps(report.to_dict(), indent=1) + "\n"
        write_file(self._place, content.encode(), mark=_MARK)
        if self._disk is not None:
            self._aside.unlink(missing_ok=True)


def plan_salvage(path: Location, target: Location, options: SalvageOptions) -> Salvage:
    """Read a damaged checkpoint as far as possible, and plan to write what is intact of it.

    Raises NotFound or Unrecognized if there is no checkpoint, Unsupported if nothing in it is
    intact or the target cannot be written. The source is only read.
    """
    target = resolve_target(target)
    surveyed = survey(path, options.read)
    recovery = rebuild(surveyed, options.read)
    opened = OpenedCheckpoint(surveyed.path, surveyed.source, surveyed.format, recovery.catalog)
    require_apart(opened, target)
    place = target.with_name(f"{target.name}.salvage.json")
    if place.exists() and not options.transfer.overwrite:
        raise Unsupported(f"{place} already exists", hint="--overwrite replaces it")
    listing = Listing(place)
    workers = options.transfer.run.workers or opened.source.policy.workers
    intact = find_intact(opened, recovery.problems, workers)
    catalog = intact.catalog
    if not catalog.tensors and not catalog.objects:
        raise Unsupported(
            f"{surveyed.path}: nothing in it can be recovered",
            hint=f"run: ckptool verify {surveyed.path}",
        )
    writer = single_file_suffixes().get(target.suffix, FORMATS["dcp"])
    layout = writer.lay_out(catalog, Request(target.name))
    require_own_files(surveyed.source, layout.files)
    report = SalvageReport(
        path=str(surveyed.path),
        format=surveyed.format.name,
        target=str(target),
        target_format=writer.name,
        tensors=len(catalog.tensors),
        values=len(catalog.objects),
        nbytes=layout.nbytes,
        unproved=intact.unproved,
        lost=intact.losses,
        problems=tuple(str(p) for p in recovery.problems if p.tensor not in intact.losses),
        unknown=recovery.unknown,
        notes=(
            *layout.notes,
            *([] if writer.writing.has_metadata else note_lost(catalog)),
            *target_notes(opened, target, layout, options.transfer),
        ),
        listing=str(place),
    )
    plan = Plan(catalog, layout)
    return Salvage(opened, plan, target, options.transfer, report, "salvage", listing=listing)
