"""Write a checkpoint for a new device mesh; state that differs between ranks by --rank-state."""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptool.commands.keymap.assets import with_assets
from ckptool.commands.keymap.model_config import records
from ckptool.commands.open import OpenedCheckpoint, no_collecting, open_checkpoint, require_readable
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.plan_file import read_plan, read_tp_plan
from ckptool.commands.rewrite import apply_key_map
from ckptool.commands.transfer import (
    Progress,
    Transfer,
    TransferReport,
    no_progress,
    require_agreement,
    require_apart,
    resolve_target,
)
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.mesh import Mesh
from ckptool.core.plan import ChunkIndex, Plan
from ckptool.core.selection import drop_names, without_rank
from ckptool.core.sharding.placement import POLICIES, Choice, PlacedTensors, Placer
from ckptool.core.text import list_some
from ckptool.engine.ranks import Ranks
from ckptool.engine.write.run import peak_memory
from ckptool.errors import Unsupported, UsageError
from ckptool.formats import FORMATS, targets
from ckptool.formats.base import Format, Request
from ckptool.storage.url import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport(TransferReport):
    """What is to be written, or was. Sizes in bytes.

    ``rank_bytes`` is what each rank of the mesh holds, ``peak_memory`` the most that moving the
    bytes needs beside the catalog, ``budget`` what it may.
    """

    mesh: Mesh
    choices: dict[str, Choice] = field(metadata={"key": None})
    rank_bytes: tuple[int, ...]
    peak_memory: int
    budget: int


@dataclass(frozen=True, slots=True)
class Costs:
    """``read_bytes`` is what the reshard reads from the source's files, gaps and all.

    ``from_source`` and ``from_target`` are what each rank of the new mesh opens and reads at load.
    """

    read_bytes: int
    from_source: tuple[LoadCost, ...]
    from_target: tuple[LoadCost, ...]


@dataclass(frozen=True, slots=True)
class Reshard(Transfer[ReshardReport]):
    """A reshard that is planned and checked, but not begun.

    With ``check`` the result is loaded through torch and compared with the source.
    """

    placed: PlacedTensors = field(kw_only=True)
    check: bool = field(kw_only=True)

    def run(self, progress: Progress = no_progress, ranks: Ranks | None = None) -> ReshardReport:
        """Write the target as a transfer does, and load it where that is asked for."""
        ranks = ranks or Ranks()
        self.require_possible(ranks)
        report = Transfer.run(self, progress, ranks)
        if self.check:
            from ckptool.commands.reshard.load_check import check_loads

            check_loads(self, ranks)
        return report

    def require_possible(self, ranks: Ranks) -> None:
        """Raise Unsupported where the result is to be loaded, and these ranks cannot."""
        if self.check:
            from ckptool.commands.reshard.load_check import require_loadable

            require_loadable(self, ranks)

    def costs(self) -> Costs:
        """Return what the reshard will read, and what each rank of the new mesh will at load."""
        from ckptool.core.layout import written_entries
        from ckptool.engine.write.cost import bytes_to_read

        sources = {entry.name: entry for entry in self.plan.entries}
        written = written_entries(self.plan.layout, sources)
        return Costs(
            bytes_to_read(self.plan, self.opened.source),
            load_costs(self.plan.entries, self.placed),
            load_costs(written.values(), self.placed),
        )


@no_collecting()
def prepare_reshard(source: Location, target: Location | None, options: ReshardOptions) -> Reshard:
    """Plan a reshard: nothing is written yet, and no tensor byte is read.

    ``target`` None means a sibling of the source named after the mesh. Raises UsageError,
    Unsupported or a SourceError where it cannot be done as asked.
    """
    _require_rank_state(options.rank_state)
    placer = _placer(options)
    opened = open_checkpoint(source, replace(options.read, per_rank=True), whole=False)
    if target is None:
        beside = opened.path.resolve()
        target = beside.with_name(f"{beside.name}-{'x'.join(map(str, placer.mesh.shape))}")
    target = resolve_target(target)
    require_apart(opened, target)
    catalog = resolve_rank_state(opened.catalog, options.rank_state)
    excluded = _exclusion_note(opened.catalog, catalog)
    require_readable(catalog, opened.source, str(opened.path))
    require_agreement(catalog)
    if not catalog.tensors:
        raise Unsupported(f"{opened.path}: no tensors to reshard")
    catalog, map_report = apply_key_map(opened, opened.open_containers(catalog), options.map)
    writer = _writer(options.to, opened)
    placer = replace(placer, rules=(*placer.rules, *writer.rules()))
    choices = placer.choose(catalog)
    placed = PlacedTensors(
        placer.mesh, {name: choice.placements for name, choice in choices.items()}
    )
    request = _request(opened, catalog, writer, target, placed, options.map.assets)
    layout = writer.lay_out(catalog, request)
    layout = with_assets(
        layout, options.map.assets, map_report, catalog, model=writer.is_model_folder
    )
    plan = Plan(catalog, layout)
    report = ReshardReport.of(
        opened,
        plan,
        target,
        writer,
        options.transfer,
        mesh=placer.mesh,
        choices=choices,
        rank_bytes=_rank_bytes(catalog, placed),
        peak_memory=peak_memory(
            plan, opened.source, options.transfer.run, local=isinstance(target, Path)
        ),
        budget=options.transfer.run.budget,
        map=map_report,
        notes=(*catalog.notes, *excluded, *layout.notes),
    )
    decided = (writer.name, placed, map_report and map_report.decided)
    transfer = options.transfer
    return Reshard(
        opened, plan, target, transfer, report, decided, placed=placed, check=options.check
    )


def _request(
    opened: OpenedCheckpoint,
    catalog: Catalog,
    writer: Format,
    target: Location,
    placed: PlacedTensors,
    assets: Path | None,
) -> Request:
    """Return what the writer is asked for, with the model's configuration where it wants that."""
    known = records(opened.source, catalog, assets) if writer.is_model_folder else []
    config = ChainMap(*map(dict, known))  # the strongest record first
    return Request(target.name, placed=placed, config=config)


# What decides the placements


def _placer(options: ReshardOptions) -> Placer:
    mesh, rules = options.mesh, list(options.rules)
    if options.plan_file is not None:
        mesh, more = read_plan(options.plan_file, mesh)
        rules += more
    if options.tp_plan is not None:
        rules += read_tp_plan(options.tp_plan)
    if mesh is None:
        raise UsageError(
            "no mesh given", hint="give --mesh 2x4, --mesh dp=2,tp=4, or --plan FILE with a mesh"
        )
    if options.policy is not None and options.policy not in POLICIES:
        raise UsageError(
            f"--policy {options.policy!r}: unknown policy", hint="one of " + ", ".join(POLICIES)
        )
    return Placer(mesh, tuple(rules), options.policy)


# Where to


def _writer(to: str | None, opened: OpenedCheckpoint) -> Format:
    """Return the target format: as asked, or the source's own where that is cut for a mesh."""
    if to is not None:
        if to not in FORMATS or FORMATS[to].reshard is None:
            known = ", ".join(targets(mesh=True))
            raise UsageError(f"--to {to!r}: unknown format", hint=f"one of {known}")
        return FORMATS[to]
    if opened.catalog.info.get("writer") == "torch_checkpointing":
        return FORMATS["torch-checkpointing"]
    return FORMATS["dcp"] if opened.format.reshard is None else opened.format


def _rank_bytes(catalog: Catalog, placed: PlacedTensors) -> tuple[int, ...]:
    """Return the bytes of tensor data that each rank of the new mesh holds."""
    totals = [0] * placed.mesh.size
    for entry in catalog.tensors.values():
        for position, shard in enumerate(placed.shards(entry)):
            elements = sum(piece.box.volume for piece in shard.pieces)
            totals[position] += elements * entry.dtype.itemsize
    return tuple(totals)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Files that a rank opens, and bytes of tensor data that it reads."""

    files: int
    nbytes: int


def load_costs(entries: Iterable[TensorEntry], placed: PlacedTensors) -> tuple[LoadCost, ...]:
    """Return the cost per row-major position of the mesh, if every chunk touched is read whole.

    ``torch.distributed.checkpoint.load`` (torch 2.13) reads whole items, however little of one a
    rank needs.
    """
    files: list[set[str]] = [set() for _ in range(placed.mesh.size)]
    nbytes = [0] * placed.mesh.size
    for entry in entries:
        index = ChunkIndex(entry)
        for position, shard in enumerate(placed.shards(entry)):
            touched = {
                id(chunk): chunk for piece in shard.pieces for chunk, _ in index.find(piece.box)
            }
            for chunk in touched.values():
                files[position].add(chunk.at.file)
                nbytes[position] += chunk.box.volume * entry.source_dtype.itemsize
    return tuple(LoadCost(len(names), size) for names, size in zip(files, nbytes, strict=True))


_WORDS = ("stop", "keep", "drop")
_RANK_STATE = re.compile(r"(?P<name>.*)@rank(?P<rank>\d+)")


def _require_rank_state(what: str) -> None:
    """Raise UsageError where ``what`` is neither a word for all of it nor a rank."""
    if what not in _WORDS and not what.isdecimal():
        raise UsageError(
            f"invalid --rank-state {what!r}", hint="stop, keep, drop, or a rank of the source"
        )


def resolve_rank_state(catalog: Catalog, what: str) -> Catalog:
    """Return the catalog without, with all, or with one rank's state that differs between ranks.

    ``what`` is ``drop``, ``keep``, ``stop`` or the number of a rank. Raises Unsupported, with the
    list, where there is such state and it is ``stop``; UsageError where that rank has none.
    """
    if what == "drop":
        return drop_names(catalog, filter(_RANK_STATE.fullmatch, _names(catalog)))
    names = [n for n in (*catalog.tensors, *catalog.objects) if _RANK_STATE.fullmatch(n)]
    if not names or what == "keep":
        return catalog
    if what == "stop":
        kinds = Counter(_RANK_STATE.sub(r"\g<name>", name) for name in names)
        listed = ", ".join(list(kinds)[:8]) + (" ..." if len(kinds) > 8 else "")
        raise Unsupported(
            f"{len(kinds)} values differ between ranks of the source: {listed}",
            hint="--rank-state drop excludes them, keep keeps each as NAME@rankR, 0 uses rank"
            " 0's for all",
        )
    return _select_rank(catalog, names, what)


def _exclusion_note(before: Catalog, after: Catalog) -> list[str]:
    """Return a note that names the state of ranks which --rank-state excludes, if any."""
    kept = set(_names(after))
    gone = [name for name in _names(before) if name not in kept]
    gone = [name for name in gone if _RANK_STATE.sub(r"\g<name>", name) not in kept]
    return [f"excluded rank-specific state (--rank-state): {list_some(gone)}"] if gone else []


def _names(catalog: Catalog) -> tuple[str, ...]:
    """Return the names of all tensors and values, and of those that cannot be read."""
    return (*catalog.tensors, *catalog.objects, *catalog.conflicts)


def _select_rank(catalog: Catalog, names: list[str], rank: str) -> Catalog:
    mine = {name for name in names if name.endswith(f"@rank{rank}")}
    if not mine:
        raise UsageError(f"--rank-state {rank!r}: use stop, keep, drop or a rank of the source")
    others = [name for name in _names(catalog) if _RANK_STATE.fullmatch(name)]
    kept = drop_names(catalog, [n for n in others if not n.endswith(f"@rank{rank}")])
    return without_rank(kept, mine)
