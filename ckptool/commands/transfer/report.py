"""The planned or finished transfer: the common part of the reports of all writing commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct, field

from ckptool.commands.document import Report
from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.options.target import TransferOptions
from ckptool.commands.transfer.overwrite import kept_note
from ckptool.core.casts import uncounted_notes
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout
from ckptool.core.planning.plan import Plan
from ckptool.engine.check.proof import reread_bytes
from ckptool.engine.share import Share
from ckptool.errors import Problem, Unsupported
from ckptool.formats import FORMATS
from ckptool.serialization.safetensors_metadata import note_lost
from ckptool.serialization.state_dict.values import NOT_CARRIED
from ckptool.storage.disk import nearest_folder
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.commands.keymap.maps import MapReport


class Part(Struct, frozen=True):
    """One of ``of`` parts, planned, or written if ``done``; numbers start at 1."""

    number: int
    of: int
    files: int
    nbytes: int
    done: bool = False

    @classmethod
    def of_layout(cls, share: Share, layout: Layout) -> Self:
        """Return the part for a share of a layout's files."""
        files = [layout.files[number] for number in share.files(layout)]
        nbytes = sum(file.nbytes for file in files)
        return cls(share.position + 1, share.size, len(files), nbytes)


class TransferReport(Report, frozen=True, kw_only=True):
    """A transfer, planned or ``written``; sizes in bytes.

    ``verify`` means that the output is read back and compared before it is put in place, for which
    ``reread_bytes`` are read of the source again. ``part`` is the requested part, if any;
    ``written`` is true once all parts are.
    """

    source: Location
    source_format: str
    target: Location
    target_format: str
    files: tuple[FileLayout, ...] = field(name="_files")
    read_bytes: int
    write_bytes: int
    free_bytes: int | None
    tensors: int = field(name="totals.tensors")
    objects: int = field(name="totals.values")
    verify: bool
    reread_bytes: int
    map: MapReport | None = field(default=None, name="_map")
    notes: tuple[str, ...]
    written: bool = False
    part: Part | None = None

    def more(self) -> Mapping[str, object]:
        """Return the files, and the tensors that a key map makes."""
        files = [{"path": file.path, "bytes": file.nbytes} for file in self.files]
        return {"files": files, "map": None if self.map is None else self.map.to_dict()}

    @classmethod
    def of(
        cls,
        opened: OpenedCheckpoint,
        plan: Plan,
        target: Location,
        target_format: str,
        options: TransferOptions,
        *,
        notes: Iterable[str],
        **more: Any,
    ) -> Self:
        """Return the report of a plan; ``more`` are the fields that the plan does not determine."""
        part = None if options.part is None else Part.of_layout(options.part, plan.layout)
        return cls(
            source=opened.path,
            source_format=opened.format.name,
            target=target,
            target_format=target_format,
            files=plan.layout.files,
            read_bytes=plan.read_bytes,
            write_bytes=plan.layout.nbytes,
            free_bytes=free_bytes(target.parent),
            tensors=len(plan.catalog.tensors),
            objects=len(plan.catalog.objects.keys() - not_carried(plan.layout, plan.catalog)),
            verify=options.verify,
            reread_bytes=reread_bytes(plan.entries) if options.verify else 0,
            notes=(
                *notes,
                *([] if has_metadata(target_format) else note_lost(plan.catalog)),
                *([] if options.verify else uncounted_notes(plan.entries)),
                *target_notes(opened, target, plan.layout, options),
            ),
            part=part,
            **more,
        )


def has_metadata(format_name: str) -> bool:
    """Return whether files of a format have a place for texts about tensors."""
    return format_name in FORMATS and FORMATS[format_name].writing.has_metadata


def not_carried(layout: Layout, catalog: Catalog) -> set[str]:
    """Return the names of values that the layout does not hold, as notes on each say."""
    notes = (note for note in (*catalog.notes, *layout.notes) if isinstance(note, Problem))
    return {str(note.tensor) for note in notes if note.code == NOT_CARRIED}


def target_notes(
    opened: OpenedCheckpoint, target: Location, layout: Layout, options: TransferOptions
) -> tuple[str, ...]:
    """Return notes on the target, and on what stays there."""
    note = kept_note(target, layout, opened.source) if options.overwrite else None
    notes = [] if note is None else [note]
    if on_disk(target) is not None:
        return tuple(notes)
    if options.overwrite and len(layout.files) > 1:
        notes.append(
            f"the checkpoint at {target} is removed before the new one is written: stores cannot"
            " rename"
        )
    if str(target).startswith("hf://"):
        notes.append("hf:// stages each file on local disk before upload")
    return tuple(notes)


def free_bytes(folder: Location) -> int | None:
    """Return the free bytes of a folder's disk, 0 if unknown; None for a store."""
    path = on_disk(folder)
    if path is None:
        return None
    try:
        return shutil.disk_usage(nearest_folder(path)).free
    except (OSError, Unsupported):
        return 0


def standing_note(source: Location, target: Location, options: TransferOptions) -> str:
    """Return what stands once a transfer has written its part, or committed all."""
    if (share := options.part) is not None:
        return f"part {share.position + 1} of {share.size} of {target} is complete"
    if options.verify:
        return f"{target} is complete and verified"
    places = " --against ".join(quote(str(place)) for place in (source, target))
    how = f"`ckptool verify {places}`, with the same options, does it"
    return f"{target} is complete, but not verified: {how}"
