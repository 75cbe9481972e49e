"""Write a checkpoint for a new device mesh."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptool.commands.assets import mapped, with_assets
from ckptool.commands.map_report import MapOptions, MapReport, decided_by
from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.plan_file import read_plan, read_tp_plan
from ckptool.commands.rank_state import names_left_out, require_rank_state, settled
from ckptool.commands.read_options import AS_DETECTED, ReadOptions
from ckptool.commands.transfer import (
    Progress,
    Transfer,
    TransferOptions,
    free_bytes,
    named_target,
    no_progress,
    require_agreement,
    require_apart,
    target_notes,
)
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout
from ckptool.core.mesh import Mesh
from ckptool.core.placement_styles import POLICIES
from ckptool.core.placing import (
    Choice,
    Placed,
    Placer,
    Rule,
)
from ckptool.core.plan import Plan
from ckptool.engine.ranks import Ranks
from ckptool.engine.remote_path import Location
from ckptool.engine.run import peak_memory
from ckptool.errors import CannotDo, UsageError
from ckptool.formats import CUTS, WRITERS
from ckptool.formats.base import Request

if TYPE_CHECKING:
    from ckptool.commands.load_cost import LoadCost


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The mesh, what decides the placements, how to read and how to write.

    ``rank_state`` is what becomes of state that differs between the source's ranks, whatever
    ``read.per_rank`` says: ``stop``, ``keep``, ``drop``, or the rank whose state is taken. ``to``
    is a target format, or None for the source's own kind.
    """

    mesh: Mesh | None = None
    rules: tuple[Rule, ...] = ()
    policy: str | None = None
    plan_file: Path | None = None
    tp_plan: Path | None = None
    to: str | None = None
    read: ReadOptions = AS_DETECTED
    rank_state: str = "stop"
    map: MapOptions = field(default_factory=MapOptions)
    transfer: TransferOptions = field(default_factory=lambda: TransferOptions(verify=True))


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What is to be written, or was. Sizes in bytes.

    ``rank_bytes`` is what each rank of the mesh holds, ``peak_memory`` the most that moving the
    bytes needs beside the catalog, ``budget`` what it may.
    """

    source: Location
    source_format: str
    target: Location
    target_format: str
    mesh: Mesh
    choices: dict[str, Choice]
    files: tuple[FileLayout, ...]
    read_bytes: int
    write_bytes: int
    free_bytes: int | None
    rank_bytes: tuple[int, ...]
    peak_memory: int
    budget: int
    objects: int
    map: MapReport | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """``read_bytes`` is what the reshard reads from the source's files, gaps and all.

    ``from_source`` and ``from_target`` are what each rank of the new mesh opens and reads at load.
    """

    read_bytes: int
    from_source: tuple[LoadCost, ...]
    from_target: tuple[LoadCost, ...]


@dataclass(frozen=True, slots=True)
class PreparedReshard:
    """A reshard that is planned and checked, but not begun."""

    transfer: Transfer
    report: ReshardReport
    placed: Placed

    def costs(self) -> Costs:
        """What the reshard will read, and what each rank of the new mesh will at load."""
        from ckptool.commands.load_cost import load_costs
        from ckptool.core.written import written_entries
        from ckptool.engine.cost import bytes_to_read

        plan = self.transfer.plan
        sources = {entry.name: entry for entry in plan.entries}
        written = written_entries(plan.layout, sources)
        return Costs(
            bytes_to_read(plan, self.transfer.opened.source),
            load_costs(plan.entries, self.placed),
            load_costs(written.values(), self.placed),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the transfer moves."""
        return self.transfer.nbytes

    def run(self, progress: Progress = no_progress, ranks: Ranks | None = None) -> ReshardReport:
        """Write the target. Raises as a transfer does; the target is whole or not there."""
        notes = self.transfer.run(progress, ranks)
        return replace(self.report, notes=(*self.report.notes, *notes))


def _config(opened: Opened, catalog: Catalog, options: ReshardOptions) -> Mapping[str, Any]:
    """What is recorded of the model, the strongest record first."""
    from ckptool.commands.model_facts import records

    return ChainMap(*map(dict, records(opened.source, catalog, options.map.assets)))


def prepare_reshard(
    source: Location, target: Location | None, options: ReshardOptions
) -> PreparedReshard:
    """Plan a reshard: nothing is written yet, and no tensor byte is read.

    ``target`` None means a sibling of the source named after the mesh. Raises UsageError,
    CannotDo or a SourceError where it cannot be done as asked.
    """
    require_rank_state(options.rank_state)
    placer = _placer(options)
    opened = open_checkpoint(source, replace(options.read, per_rank=True), whole=False)
    target = named_target(target or _sibling(opened.path, placer.mesh))
    require_apart(opened, target)
    catalog = settled(opened.catalog, options.rank_state)
    left_out = names_left_out(opened.catalog, catalog)
    require_agreement(catalog)
    if not catalog.tensors:
        raise CannotDo(f"{opened.path}: no tensor to reshard")
    catalog, map_report = mapped(opened, opened.located(catalog), options.map)
    writer = _writer_name(options.to, opened)
    placer = replace(placer, rules=(*placer.rules, *CUTS.get(writer, ())))
    choices = placer.choose(catalog)
    placed = Placed(placer.mesh, {name: choice.placements for name, choice in choices.items()})
    config = _config(opened, catalog, options) if writer == "sharded-state" else {}
    layout = WRITERS[writer](catalog, Request(target.name, placed=placed, config=config))
    layout = with_assets(
        layout, options.map.assets, map_report, catalog, model=writer == "sharded-state"
    )
    plan = Plan(catalog, layout)
    report = ReshardReport(
        source=opened.path,
        source_format=opened.format.name,
        target=target,
        target_format=writer,
        mesh=placer.mesh,
        choices=choices,
        files=layout.files,
        read_bytes=plan.read_bytes,
        write_bytes=layout.nbytes,
        free_bytes=free_bytes(target.parent),
        rank_bytes=_rank_bytes(catalog, placed),
        peak_memory=peak_memory(
            plan, opened.source, options.transfer.run, local=isinstance(target, Path)
        ),
        budget=options.transfer.run.budget,
        objects=len(catalog.objects),
        map=map_report,
        notes=(
            *catalog.notes,
            *left_out,
            *layout.notes,
            *target_notes(opened, target, layout, options.transfer),
        ),
    )
    decided = (writer, placed, decided_by(map_report))
    transfer = Transfer(opened, plan, target, options.transfer, decided, placer.mesh.size)
    return PreparedReshard(transfer, report, placed)


# What decides the placements


def _placer(options: ReshardOptions) -> Placer:
    mesh, rules = options.mesh, list(options.rules)
    if options.plan_file is not None:
        mesh, more = read_plan(options.plan_file, mesh)
        rules += more
    if options.tp_plan is not None:
        rules += read_tp_plan(options.tp_plan)
    if mesh is None:
        raise UsageError("no mesh", hint="--mesh 2x4, --mesh dp=2,tp=4, or a --plan that names one")
    if options.policy is not None and options.policy not in POLICIES:
        raise UsageError(
            f"--policy {options.policy!r}: no such policy", hint="one of " + ", ".join(POLICIES)
        )
    return Placer(mesh, tuple(rules), options.policy)


# Where to


def _sibling(source: Location, mesh: Mesh) -> Location:
    source = source.resolve()
    return source.with_name(f"{source.name}-{'x'.join(map(str, mesh.shape))}")


def _writer_name(to: str | None, opened: Opened) -> str:
    """The target format: as asked, or the source's own kind where that is written for a mesh."""
    if to is not None and to not in WRITERS:
        raise UsageError(f"--to {to!r}: no such target", hint="one of " + ", ".join(WRITERS))
    if to is not None:
        return to
    if opened.catalog.info.get("writer") == "torch_checkpointing":
        return "torch-checkpointing"
    return opened.format.name if opened.format.name in WRITERS else "dcp"


def _rank_bytes(catalog: Catalog, placed: Placed) -> tuple[int, ...]:
    """Bytes of tensor data that each rank of the new mesh holds."""
    totals = [0] * placed.mesh.size
    for entry in catalog.tensors.values():
        for position, shard in enumerate(placed.shards(entry)):
            held = sum(piece.box.volume for piece in shard.pieces)
            totals[position] += held * entry.dtype.itemsize
    return tuple(totals)
