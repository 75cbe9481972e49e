"""Write what is provably whole of a damaged checkpoint, and list what is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptool.commands.open import Opened, survey
from ckptool.commands.read_options import AS_DETECTED, ReadOptions
from ckptool.commands.transfer import Progress, Transfer, TransferOptions, require_apart
from ckptool.commands.verify.rebuild import rebuild
from ckptool.commands.verify.wholeness import whole_part
from ckptool.core.plan import Plan
from ckptool.engine.remote_path import Location
from ckptool.errors import CannotDo, NotFound, TransferError
from ckptool.formats import CONVERTERS
from ckptool.formats.base import Request

_WRITERS = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch-save"),
}
"""The format of a single file by its suffix; a folder becomes a DCP checkpoint."""


@dataclass(frozen=True, slots=True)
class SalvageOptions:
    """How to read the source, and how to write what is whole of it."""

    read: ReadOptions = AS_DETECTED
    transfer: TransferOptions = field(default_factory=TransferOptions)


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What is whole, and what is lost of the checkpoint at ``path``.

    ``lost`` maps names to why; ``problems`` are what else is wrong with the source, ``unknown``
    what no file tells any more, ``notes`` what the target holds otherwise or not. ``unproved`` of
    the tensors lie in bytes for which no checksum is stored. ``nbytes`` were written; ``listing``
    is the file beside the target that says all of this.
    """

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
        """Whether nothing is lost, as far as can be known."""
        left = any(note.startswith("not carried") for note in self.notes)
        return not (self.lost or self.problems or self.unknown or left)


@dataclass(frozen=True, slots=True)
class Salvage:
    """What of a damaged checkpoint is whole, planned to be written."""

    transfer: Transfer
    report: SalvageReport
    listing: Location

    @property
    def nbytes(self) -> int:
        """Bytes that ``run`` writes."""
        return self.transfer.nbytes

    def run(self, progress: Progress = lambda nbytes: None) -> SalvageReport:
        """Write the target, whole or not at all, then the list beside it."""
        self.transfer.run(progress)
        content = json.dumps(salvage_content(self.report), indent=1) + "\n"
        try:
            self.listing.write_bytes(content.encode())
        except (OSError, NotFound) as error:
            reason = error.strerror if isinstance(error, OSError) else error.message
            message = f"{self.listing}: cannot be written: {reason}; the target is whole"
            raise TransferError(message) from None
        return self.report


def plan_salvage(path: Location, target: Location, options: SalvageOptions) -> Salvage:
    """Read a damaged checkpoint as far as it can be, and plan to write what is whole of it.

    Raises NotFound or Unrecognised where there is no checkpoint, CannotDo where nothing in it is
    whole or the target cannot be written. The source is only read.
    """
    found = survey(path, options.read)
    rebuilt = rebuild(found, options.read)
    opened = Opened(found.path, found.source, found.format, rebuilt.catalog)
    require_apart(opened, target)
    listing = target.with_name(f"{target.name}.salvage.json")
    if listing.exists() and not options.transfer.overwrite:
        raise CannotDo(f"{listing} exists already", hint="--overwrite replaces it")
    workers = options.transfer.run.workers or opened.source.workers
    whole = whole_part(opened, rebuilt.problems, workers)
    if not whole.catalog.tensors and not whole.catalog.objects:
        raise CannotDo(
            f"{found.path}: nothing in it is whole",
            hint="ckptool verify lists what is wrong with it",
        )
    writer = _WRITERS.get(target.suffix, "dcp")
    layout = CONVERTERS[writer](whole.catalog, Request(target.name))
    plan = Plan(whole.catalog, layout)
    report = SalvageReport(
        path=str(found.path),
        format=found.format.name,
        target=str(target),
        target_format=writer,
        tensors=len(whole.catalog.tensors),
        values=len(whole.catalog.objects),
        nbytes=layout.nbytes,
        unproved=whole.unproved,
        lost=whole.lost,
        problems=tuple(str(one) for one in rebuilt.problems if one.tensor not in whole.lost),
        unknown=rebuilt.unknown,
        notes=layout.notes,
        listing=str(listing),
    )
    transfer = Transfer(opened, plan, target, options.transfer, "salvage")
    return Salvage(transfer, report, listing)


def salvage_content(report: SalvageReport) -> dict[str, Any]:
    """The report as ``ckptool.salvage/1``."""
    return {"schema": "ckptool.salvage/1", "complete": report.complete} | asdict(report)
