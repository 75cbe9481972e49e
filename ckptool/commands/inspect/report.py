"""What a checkpoint holds, from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.document import Report, document, plain
from ckptool.commands.inspect.values import tensor_row, value_row
from ckptool.commands.open import OpenedCheckpoint, open_checkpoint, survey
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.runs.names import step_named
from ckptool.commands.runs.records import recorded_step
from ckptool.commands.verify.codes import is_error
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.quantization.names import kinds
from ckptool.core.sharding.coverage import coverage_problems
from ckptool.core.state_category import STATE_CATEGORIES, lone_masters, state_category
from ckptool.core.text import plural
from ckptool.errors import CkptoolError, Damaged, Hostile, Problem
from ckptool.storage.place import traffic_of
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.storage.store import Traffic


class Totals(Struct, frozen=True):
    """Four totals of the checkpoint. ``parameters`` counts the elements of the model's tensors."""

    tensors: int
    parameters: int
    nbytes: int
    files: int


class PartShare(Struct, frozen=True):
    """The contents of one part of the checkpoint in one element type."""

    part: str
    dtype: DType
    tensors: int
    elements: int
    nbytes: int


class ModuleShare(Struct, frozen=True):
    """The tensors of one module: their sizes, and in which element types."""

    module: str
    tensors: int
    elements: int
    nbytes: int
    dtypes: tuple[str, ...]


class InspectReport(Report, frozen=True):
    """What ``inspect`` shows; true if the whole checkpoint can be read.

    ``problems`` make parts unreadable: ranks that contradict one another, tensors that their chunks
    do not tile, and those of ``error`` if it cannot be read as a whole.
    """

    opened: OpenedCheckpoint
    step: int | None
    totals: Totals
    shares: tuple[PartShare, ...]
    problems: tuple[str, ...]
    error: CkptoolError | None = None

    schema: ClassVar = "inspect"

    def __repr__(self) -> str:
        text = f"{self.path} {self.catalog.format}: {plural(self.totals.tensors, 'tensor')}"
        return f"<ckptool.InspectReport {text}, {self.totals.nbytes:,} bytes>"

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self, tensors: Iterable[TensorEntry] | None = None) -> dict[str, Any]:
        """Return the object that ``--json`` prints, with all ``tensors``, or only these."""
        catalog, mesh = self.catalog, self.catalog.mesh
        entries = catalog.tensors.values() if tensors is None else tensors
        content = document(
            self.schema,
            path=self.path,
            format=catalog.format,
            info=catalog.info,
            quantized=kinds(catalog),
            step=self.step,
            world_size=catalog.world_size,
            mesh=mesh and plain(mesh) | {"source": catalog.mesh_source},
            totals=self.totals,
            shares=[plain(share) | {"dtype": share.dtype.name} for share in self.shares],
            tensors=(),
            values=list(map(value_row, catalog.objects.values())),
            metadata=catalog.metadata,
            notes=self.notes,
            problems=self.problems,
            ok=self.ok,
        )
        content["tensors"] = list(map(tensor_row, entries))  # plain already, and very many
        return content

    def _short(self) -> dict[str, Any]:
        size = {"tensors": self.totals.tensors, "bytes": self.totals.nbytes}
        return {"path": str(self.path), "format": self.catalog.format, **size, "ok": self.ok}

    @property
    def traffic(self) -> Traffic | None:
        """Return the requests to the store so far; None if the checkpoint is on a disk."""
        return traffic_of(self.path)

    @property
    def path(self) -> Location:
        return self.opened.path

    @property
    def catalog(self) -> Catalog:
        return self.opened.catalog

    @property
    def notes(self) -> tuple[str, ...]:
        conflicts = {str(why): _is_error(why) for why in self.catalog.conflicts.values()}
        warnings = tuple(why for why, is_error in conflicts.items() if not is_error)
        return warnings + tuple(n for n in self.catalog.notes if str(n) not in conflicts)


def inspect(path: Location, options: ReadOptions = AS_DETECTED) -> InspectReport:
    """Detect the checkpoint at ``path`` and describe it. No tensor byte is read."""
    return report(open_checkpoint(path, options))


def inspect_readable(path: Location, options: ReadOptions = AS_DETECTED) -> InspectReport:
    """Describe the checkpoint at ``path``, or what is readable of a damaged one.

    Raises as ``inspect`` does if nothing is readable.
    """
    try:
        return inspect(path, options)
    except (Damaged, Hostile) as error:
        _release(error)
        remains = survey(path, options)
        opened = remains.opened
        if opened is None or not (opened.catalog.tensors or opened.catalog.objects):
            raise
        result = report(opened)
        problems = dict.fromkeys((*error.problems, *remains.problems, *result.problems))
        return replace(result, problems=tuple(problems), error=error)


def _release(error: BaseException) -> None:
    """Drop what the calls that an error ended still hold, such as all metadata."""
    import traceback

    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def report(opened: OpenedCheckpoint) -> InspectReport:
    """Describe a checkpoint that is already open."""
    catalog = opened.catalog
    shares = shares_of(catalog.tensors.values())
    totals = Totals(
        tensors=len(catalog.tensors),
        parameters=sum(share.elements for share in shares if share.part == "model")
        + sum(catalog.tensors[name].elements for name in lone_masters(catalog)),
        nbytes=sum(share.nbytes for share in shares),
        files=len(catalog.files),
    )
    errors = filter(_is_error, catalog.conflicts.values())
    problems = (*errors, *coverage_problems(catalog.tensors.values()))
    return InspectReport(opened, step_of(opened.path, catalog), totals, shares, problems)


def _is_error(why: str) -> bool:
    """Return whether a conflict is an error, not the warning of an exclusion on purpose."""
    return not isinstance(why, Problem) or is_error(why.code)


def shares_of(entries: Iterable[TensorEntry]) -> tuple[PartShare, ...]:
    """Sum up tensors by part and element type, the largest type of a part first."""
    groups: dict[tuple[str, DType], list[int]] = {}
    for entry in entries:
        groups.setdefault((state_category(entry), entry.dtype), []).append(entry.elements)
    shares = [
        PartShare(part, dtype, len(sizes), sum(sizes), sum(sizes) * dtype.itemsize)
        for (part, dtype), sizes in groups.items()
    ]
    return tuple(
        sorted(shares, key=lambda s: (STATE_CATEGORIES.index(s.part), -s.nbytes, s.dtype.name))
    )


def modules_of(entries: Iterable[TensorEntry], depth: int) -> list[ModuleShare]:
    """Sum up tensors by the first ``depth`` steps of their names, without the last step of each."""
    groups: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        steps = entry.name.split(".")
        groups.setdefault(".".join(steps[:-1][:depth]) or entry.name, []).append(entry)
    return [
        ModuleShare(
            module,
            len(members),
            sum(entry.elements for entry in members),
            sum(entry.nbytes for entry in members),
            tuple(dict.fromkeys(entry.dtype.name for entry in members)),
        )
        for module, members in groups.items()
    ]


def step_of(path: Location, catalog: Catalog) -> int | None:
    """Return the training step: from a value, else the format, else a folder's name."""
    recorded = recorded_step(catalog)
    if recorded is not None:
        return recorded
    place = path.resolve()
    for name in (place.stem if not place.is_dir() else place.name, place.parent.name):
        if (step := step_named(name)) is not None:
            return step
    return None
