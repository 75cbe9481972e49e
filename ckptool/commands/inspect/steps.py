"""The steps of a run: when each was saved, how large it is, and whether it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from operator import itemgetter
from typing import ClassVar

from msgspec import Struct

from ckptool.commands.detect import detect_folder
from ckptool.commands.document import Report, cells_html, plain, table_html
from ckptool.commands.open import Survey
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.assessment import Assessor
from ckptool.commands.runs.order import open_run
from ckptool.commands.runs.pointers.pointers import (
    dangling_pointers,
    find_pointers,
    is_pointer,
)
from ckptool.commands.runs.records import has_optimizer
from ckptool.commands.runs.search import as_one_step
from ckptool.commands.runs.steps import Run, Step
from ckptool.core.mesh import Mesh
from ckptool.errors import NotFound, TransferError
from ckptool.storage.place import folder_at, on_disk
from ckptool.storage.url import Location


class StepSummary(Struct, frozen=True):
    """One step. ``saved`` is when its last file was written, None in a store.

    ``complete`` is judged by metadata, names and sizes; ``reasons`` say why it is not. It is
    ``unread`` if its format is only recognized.
    ``optimizer`` is true if it has an optimizer's state. ``mesh`` is None if nothing records one.
    ``pointer`` is what is in the run to name the step: a file such as ``latest``, or a link.
    """

    path: Location
    number: int | None
    saved: datetime | None
    nbytes: int
    formats: tuple[str, ...]
    complete: bool
    unread: bool
    reasons: tuple[str, ...]
    optimizer: bool
    ranks: int | None
    mesh: Mesh | None
    pointer: str | None


class RunSummary(Report, frozen=True):
    """The steps of the run at ``path``, newest first; ``mentions`` are other files naming one.

    ``dangling`` are files such as ``latest`` that name what is no step of it, by what they name.
    ``parts`` are the checkpoints in it, if it is one step itself.
    """

    path: Location
    steps: tuple[StepSummary, ...]
    mentions: tuple[str, ...] = ()
    dangling: Mapping[str, str] = {}
    parts: tuple[Location, ...] = ()

    schema: ClassVar = "inspect-run"

    def _repr_html_(self) -> str:
        """Return a table of the steps for a notebook."""
        shown = ("number", "path", "saved", "bytes", "complete", "optimizer")
        steps = map(itemgetter(*shown), map(plain, self.steps))
        return table_html([cells_html("th", shown), *(cells_html("td", row) for row in steps)])


def list_steps(run: Location, options: ReadOptions = AS_DETECTED) -> RunSummary:
    """Describe every step of a run from its metadata; no tensor byte is read.

    Raises NotFound or Unrecognized if there is no checkpoint.
    """
    opened = as_one_step(open_run(run, options))
    pointers: dict[Location, list[str]] = {}
    dangling: dict[str, str] = {}
    with suppress(TransferError):  # a pointer that cannot be read; the steps can be
        pointers = find_pointers(opened)
        dangling = dict(dangling_pointers(opened))
    assessor = Assessor(opened, VerifyOptions(read=options, quick=True), thorough=True)
    sources = dict.fromkeys(chain.from_iterable(pointers.values()))
    mentions = tuple(source for source in sources if not is_pointer(opened, source))
    steps = []
    for step in reversed(opened.steps):
        names = [name for name in pointers.get(step.path, ()) if name not in mentions]
        steps.append(_describe(step, opened, assessor, names[0] if names else None))
    parts = next((step.parts for step in opened.steps if step.path == run), ())
    return RunSummary(run, tuple(steps), mentions, dangling, parts)


def _describe(step: Step, run: Run, assessor: Assessor, pointer: str | None) -> StepSummary:
    assessment = assessor.assess(step)
    surveys, report = assessment.surveys, assessment.report
    catalogs = [survey.catalog for survey in surveys if survey.catalog is not None]
    unread = [] if surveys else [*filter(None, map(_format_recognized, step.parts))]
    sizes = [survey.source.files.values() for survey in surveys]
    sizes = sizes or [run.files_in(entry).values() for entry in step.entries]
    return StepSummary(
        step.path,
        step.number,
        _save_time(surveys),
        sum(map(sum, sizes)),
        tuple(dict.fromkeys(unread or (survey.format.name for survey in surveys))),
        report.ok,
        bool(unread),
        report.reasons,
        any(map(has_optimizer, surveys)),
        next((catalog.world_size for catalog in catalogs if catalog.world_size is not None), None),
        next((catalog.mesh for catalog in catalogs if catalog.mesh is not None), None),
        pointer,
    )


def _format_recognized(part: Location) -> str | None:
    """Return the name of a folder's format if that is only recognized."""
    row = detect_folder(folder_at(part)) if part.is_dir() else None
    return row.name if row is not None and not row.reading.is_possible else None


def _save_time(surveys: Iterable[Survey]) -> datetime | None:
    """Return when the last file was written, if the disk knows."""
    times = []
    for survey in surveys:
        if on_disk(survey.path) is None:
            return None
        for file in survey.source.files:
            with suppress(NotFound):  # removed meanwhile, as a trainer removes old steps
                times.append(survey.source.modified(file))
    return datetime.fromtimestamp(max(times), UTC) if times else None
