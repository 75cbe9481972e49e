"""Write a checkpoint for a new device mesh; --rank-state decides on state of single ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint, no_collecting, open_checkpoint, require_writable
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.families import in_families
from ckptool.commands.reshard.holdings import hold, own_writer
from ckptool.commands.reshard.plan_file import read_plan, read_tp_plan
from ckptool.commands.reshard.rank_state import (
    DroppedState,
    rank_state_notes,
    require_rank_state,
    resolve_rank_state,
)
from ckptool.commands.rewrite import RewriteResult, Selected, rewrite, select_entries
from ckptool.commands.transfer.overwrite import when_to_open
from ckptool.commands.transfer.rewritten import RewrittenReport, fields_of
from ckptool.commands.transfer.target import lay_out, require_apart, resolve_target
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.chunks import chunks_of
from ckptool.core.mesh import Mesh
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.index import ChunkIndex
from ckptool.core.sharding.placement import POLICIES, Choice, PlacedTensors, Placer
from ckptool.core.text import one_of
from ckptool.engine.progress import Progress
from ckptool.engine.ranks import Ranks
from ckptool.engine.write.run import peak_memory
from ckptool.engine.write.stage import Stage
from ckptool.errors import Unsupported, UsageError
from ckptool.formats import FORMATS, targets
from ckptool.formats.base import Format, Request
from ckptool.formats.companions import companions
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location


class ReshardReport(RewrittenReport, frozen=True, kw_only=True):
    """The planned or finished reshard; sizes in bytes.

    ``rank_bytes`` is the share of each rank of the mesh, ``peak_memory`` the memory that moving
    bytes needs besides the catalog, ``budget`` its limit. ``dropped`` is state of the source's
    ranks that is meaningless for others. ``costs`` are only in a dry run. ``entries`` are the
    tensors of ``choices``, to fold their names.
    """

    mesh: Mesh
    choices: dict[str, Choice] = field(name="_choices")
    entries: Mapping[str, TensorEntry] = field(name="_entries")
    rank_bytes: tuple[int, ...]
    peak_memory: int
    budget: int
    dropped: tuple[DroppedState, ...]
    costs: Costs | None = field(default=None, name="_costs")

    schema: ClassVar = "reshard"

    @property
    def over_read(self) -> float | None:
        """Bytes read from the source's files per byte of its tensors."""
        return None if self.costs is None else self.costs.read_bytes / max(1, self.read_bytes)

    def more(self) -> Mapping[str, object]:
        """Return the mesh, the plan, and the cost of reading it and loading the result."""
        tensors = [
            {"name": name, "placements": list(map(str, c.placements)), "reason": c.reason}
            for name, c in self.choices.items()
        ]
        more: dict[str, object] = {"over_read": self.over_read, "load": None}
        if self.costs is not None:
            more["load"] = {"source": self.costs.from_source, "target": self.costs.from_target}
        return {
            **RewrittenReport.more(self),
            **more,
            "tensors": tensors,
            "files": [{"path": f.path, "bytes": f.nbytes, "rank": f.rank} for f in self.files],
        }


class Costs(Struct, frozen=True):
    """``read_bytes`` is what the reshard reads from the source's files, including gaps.

    ``from_source`` and ``from_target`` are what each rank of the new mesh opens and reads to load.
    """

    read_bytes: int
    from_source: tuple[LoadCost, ...]
    from_target: tuple[LoadCost, ...]


class Reshard(Transfer[ReshardReport], frozen=True, kw_only=True):
    """A reshard that is planned and checked, but not begun.

    With ``check`` the result is loaded through torch and compared with the source.
    """

    placed: PlacedTensors
    check: bool

    def run_on(self, stage: Stage | None, progress: Progress, ranks: Ranks) -> ReshardReport:
        """Write the target as a transfer does, and load it if requested."""
        report = Transfer.run_on(self, stage, progress, ranks)
        if self.check:
            from ckptool.commands.reshard.load_check import check_loads

            check_loads(self, ranks)
        return report

    def require_possible(self, ranks: Ranks) -> None:
        """Raise Unsupported if the result is to be loaded, but these ranks cannot.

        Raises UsageError if only a part of it is to be written.
        """
        if self.check and self.options.part is not None:
            raise UsageError(
                "--check loads the complete checkpoint: use it with --finish, not with --part"
            )
        if self.check:
            from ckptool.commands.reshard.load_check import require_loadable

            require_loadable(self, ranks)

    def with_costs(self) -> ReshardReport:
        """Return the report with the costs of the reshard and of loading its result."""
        return replace(self.report, costs=self.costs())

    def costs(self) -> Costs:
        """Return the bytes that the reshard reads, and the cost of loading per new rank."""
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
def prepare_reshard(
    source: Location, target: Location | None, options: ReshardOptions, *, ranks: int = 1
) -> Reshard:
    """Plan a reshard, shared by ``ranks``; nothing is written and no tensor is read yet.

    ``target`` None means a sibling of the source named after the mesh. Raises UsageError,
    Unsupported or a SourceError if it cannot be done as requested.
    """
    require_rank_state(options.rank_state)
    placer = _placer(options)
    opened = open_checkpoint(source, replace(options.read, per_rank=True), whole=False)
    target = resolve_target(_sibling(opened, placer.mesh) if target is None else target)
    require_apart(opened, target)
    return plan_reshard(opened, target, options, placer, ranks=ranks)


def plan_reshard(
    opened: OpenedCheckpoint,
    target: Location,
    options: ReshardOptions,
    placer: Placer | None = None,
    *,
    ranks: int = 1,
) -> Reshard:
    """Plan to write an open checkpoint for a mesh, placed as the options say."""
    placer = placer or _placer(options)
    writer = _writer(options.to, opened)
    same_ranks = writer.loading.has_rank_state and opened.catalog.world_size == placer.mesh.size
    selection = select_entries(opened.catalog, options.rewrite.selection)
    rest, dropped = resolve_rank_state(selection.catalog, options.rank_state, same_ranks=same_ranks)
    of_ranks = rank_state_notes(dropped, rest, placer.mesh, opened.catalog)
    rewritten = _rewrite(opened, selection._replace(catalog=rest), target, options, ranks)
    catalog = in_families(rewritten.catalog, writer.writing.families)
    holdings = hold(catalog, placer, writer)
    catalog = _with_companions(opened, catalog, writer)
    request = Request(target.name, placed=holdings.placed)
    layout = lay_out(opened, replace(rewritten, catalog=catalog), writer, request)
    plan = Plan(catalog, layout)
    report = ReshardReport.of(
        opened,
        plan,
        target,
        writer.name,
        options.transfer,
        mesh=holdings.mesh,
        choices=holdings.choices,
        entries=catalog.tensors,
        rank_bytes=holdings.rank_bytes,
        peak_memory=peak_memory(
            plan, opened.source, options.transfer.run, local=on_disk(target) is not None
        ),
        budget=options.transfer.run.budget,
        **fields_of(rewritten, selection.catalog),
        dropped=dropped,
        notes=(*catalog.notes, *of_ranks, *layout.notes),
    )
    decided = (writer.name, holdings.placed, rewritten.map and rewritten.map.decided)
    transfer = options.transfer
    return Reshard(
        opened, plan, target, transfer, report, decided, placed=holdings.placed, check=options.check
    )


def _rewrite(
    opened: OpenedCheckpoint, rest: Selected, target: Location, options: ReshardOptions, ranks: int
) -> RewriteResult:
    """Map and cast the rest of a checkpoint, if it may be written; containers are opened."""
    require_writable(opened, rest.catalog)
    if not rest.catalog.tensors:
        raise Unsupported(f"{opened.path}: no tensors to reshard")
    return rewrite(
        opened,
        options.rewrite,
        selected=rest,
        opens=when_to_open(target, options.transfer, ranks),
    )


def _sibling(opened: OpenedCheckpoint, mesh: Mesh) -> Location:
    """Return the folder beside the source that is named after the mesh."""
    is_named = opened.path.name not in ("", "..")
    path = opened.path if is_named else opened.path.resolve()
    return path.with_name(f"{path.name}-{'x'.join(map(str, mesh.shape))}")


def _with_companions(opened: OpenedCheckpoint, catalog: Catalog, writer: Format) -> Catalog:
    """Add config.json and the like beside a folder such as DCP's, if the writer takes them along.

    They are only copied: what lies beside such a folder may be another's.
    """
    if not writer.loading.companions_in or catalog.companions:
        return catalog
    return replace(catalog, companions=companions(opened.source))


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
        hint = one_of(options.policy, POLICIES)
        raise UsageError(f"--policy {options.policy!r}: unknown policy", hint=hint)
    return Placer(mesh, tuple(rules), options.policy)


# Where to


def _writer(to: str | None, opened: OpenedCheckpoint) -> Format:
    """Return the target format: the requested one, or the source's own if it is cut for a mesh."""
    if to is not None:
        if to not in FORMATS or FORMATS[to].writing.reshard is None:
            why = "not written for a mesh" if to in FORMATS else "unknown format"
            whole = f"`ckptool convert SRC DST --to {to}` writes it"
            hint = whole if to in targets() else one_of(to, targets(mesh=True))
            raise UsageError(f"--to {to!r}: {why}", hint=hint)
        return FORMATS[to]
    return own_writer(opened)


class LoadCost(Struct, frozen=True):
    """The files that a rank opens, and the bytes of tensor data that it reads."""

    files: int
    nbytes: int


def load_costs(entries: Iterable[TensorEntry], placed: PlacedTensors) -> tuple[LoadCost, ...]:
    """Return the cost per row-major position of the mesh, if every chunk touched is read whole.

    ``torch.distributed.checkpoint.load`` (torch 2.13) reads whole items, even if a rank needs
    little.
    """
    files: list[set[str]] = [set() for _ in range(placed.mesh.size)]
    nbytes = [0] * placed.mesh.size
    groups: dict[object, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        cut = chunks_of(entry).cut
        placements = placed.placements[entry.name]
        groups[entry.shape, placements, entry.source_dtype, cut].append(entry)
    for entry, *rest in groups.values():
        index = ChunkIndex(entry)
        for position, shard in enumerate(placed.shards(entry)):
            chunks = {
                id(overlap.chunk): overlap.chunk
                for piece in shard.pieces
                for overlap in index.find(piece.box)
            }
            for chunk in chunks.values():
                files[position].add(chunk.at.file)
                once = chunk.box.volume * entry.source_dtype.itemsize
                nbytes[position] += once * (1 + len(rest))
    return tuple(LoadCost(len(names), size) for names, size in zip(files, nbytes, strict=True))
