"""Write a checkpoint for a new device mesh."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptool.commands.assets import mapped, with_assets
from ckptool.commands.load_cost import LoadCost, load_costs
from ckptool.commands.map_report import MapOptions, MapReport, decided_by
from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.read_options import AS_DETECTED, ReadOptions
from ckptool.commands.transfer import (
    Progress,
    Transfer,
    TransferOptions,
    free_bytes,
    no_progress,
    require_agreement,
    require_apart,
)
from ckptool.core import rewrite
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout
from ckptool.core.mesh import Mesh
from ckptool.core.placing import (
    POLICIES,
    STYLES,
    Choice,
    Placed,
    Placer,
    Rule,
    parse_mesh,
    rule_of,
    split_placements,
)
from ckptool.core.plan import Plan
from ckptool.core.written import written_entries
from ckptool.engine.ranks import Ranks
from ckptool.engine.run import peak_memory
from ckptool.errors import CannotDo, UsageError
from ckptool.formats import CUTS, WRITERS
from ckptool.formats.base import Request

RANK_STATES = ("stop", "keep", "drop")
_RANK_STATE = re.compile(r"(?P<name>.*)@rank(?P<rank>\d+)")


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

    source: Path
    source_format: str
    target: Path
    target_format: str
    mesh: Mesh
    choices: dict[str, Choice]
    files: tuple[FileLayout, ...]
    read_bytes: int
    write_bytes: int
    free_bytes: int
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
        from ckptool.engine.cost import bytes_to_read

        plan = self.transfer.plan
        sources = {entry.name: entry for entry in plan.entries}
        written = written_entries(plan.layout, sources)
        return Costs(
            bytes_to_read(plan),
            load_costs(plan.entries, self.placed),
            load_costs(written.values(), self.placed),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the transfer moves."""
        return self.transfer.nbytes

    def run(self, progress: Progress = no_progress, ranks: Ranks | None = None) -> ReshardReport:
        """Write the target. Raises as a transfer does; the target is whole or not there."""
        self.transfer.run(progress, ranks)
        return self.report


def prepare_reshard(source: Path, target: Path | None, options: ReshardOptions) -> PreparedReshard:
    """Plan a reshard: nothing is written yet, and no tensor byte is read.

    ``target`` None means a sibling of the source named after the mesh. Raises UsageError,
    CannotDo or a SourceError where it cannot be done as asked.
    """
    if options.rank_state not in RANK_STATES and not options.rank_state.isdecimal():
        raise UsageError(
            f"--rank-state {options.rank_state!r}", hint="stop, keep, drop, or a rank of the source"
        )
    placer = _placer(options)
    opened = open_checkpoint(source, replace(options.read, per_rank=True))
    target = target or _sibling(opened.path, placer.mesh)
    require_apart(opened, target)
    catalog = _settle_rank_state(opened.catalog, options.rank_state)
    left_out = _left_out(opened.catalog, catalog)
    require_agreement(catalog)
    if not catalog.tensors:
        raise CannotDo(f"{opened.path}: no tensor to reshard")
    catalog, map_report = mapped(opened, opened.located(catalog), options.map)
    writer = _writer_name(options.to, opened)
    placer = replace(placer, rules=(*placer.rules, *CUTS.get(writer, ())))
    choices = placer.choose(catalog)
    placed = Placed(placer.mesh, {name: choice.placements for name, choice in choices.items()})
    layout = WRITERS[writer](catalog, Request(target.name, placed=placed))
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
        peak_memory=peak_memory(plan, options.transfer.run),
        budget=options.transfer.run.budget,
        objects=len(catalog.objects),
        map=map_report,
        notes=(*catalog.notes, *left_out, *layout.notes),
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


def read_plan(path: Path, mesh: Mesh | None = None) -> tuple[Mesh | None, list[Rule]]:
    """The mesh and rules of a TOML plan: ``mesh``, ``names``, ``[[rule]]`` tables in order.

    A ``mesh`` that is given goes before the plan's; the plan's names go to a mesh without.
    """
    try:
        import tomllib

        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--plan {path}: {error}") from None
    names, planned = content.get("names"), content.get("mesh")
    if mesh is None and isinstance(planned, str):
        mesh = parse_mesh(planned)
    if mesh is not None and mesh.names is None and isinstance(names, list):
        if len(names) != len(mesh.shape):
            raise UsageError(f"--plan {path}: {len(names)} names for {len(mesh.shape)} mesh dims")
        mesh = Mesh.of(mesh.shape, [str(name) for name in names])
    try:
        return mesh, [_planned_rule(rule) for rule in content.get("rule", [])]
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"--plan {path}: each [[rule]] needs tensor and placements") from None


def _planned_rule(rule: Mapping[str, Any]) -> Rule:
    placements = rule["placements"]
    words = split_placements(placements) if isinstance(placements, str) else placements
    return rule_of(str(rule["tensor"]), [str(word) for word in words])


def read_tp_plan(path: Path) -> list[Rule]:
    """The rules of a ``base_model_tp_plan`` or ``tp_plan`` in a transformers config.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--tp-plan {path}: {error}") from None
    plan: Any = None
    if isinstance(content, Mapping):
        plan = content.get("base_model_tp_plan") or content.get("tp_plan")
    if not isinstance(plan, Mapping) or not all(isinstance(word, str) for word in plan.values()):
        raise UsageError(f"--tp-plan {path}: no base_model_tp_plan or tp_plan in it")
    return [
        rule for module, style in plan.items() for rule in _module_rules(str(module), str(style))
    ]


def _module_rules(module: str, style: str) -> list[Rule]:
    globs = [f"*{module}.{leaf}*" for leaf in ("weight", "bias")]
    return [Rule(glob, style=_style(style), required=False) for glob in globs]


def _style(word: str) -> str:
    if word not in STYLES:
        raise UsageError(f"--tp-plan: unknown style {word!r}", hint="one of " + ", ".join(STYLES))
    return word


# State of a rank


def _settle_rank_state(catalog: Catalog, what: str) -> Catalog:
    """The catalog without, or with all, or with one rank's state that differs between ranks."""
    names = [n for n in (*catalog.tensors, *catalog.objects) if _RANK_STATE.fullmatch(n)]
    if not names or what == "keep":
        return catalog
    if what == "drop":
        return rewrite.drop_names(catalog, names)
    if what == "stop":
        kinds = Counter(_RANK_STATE.sub(r"\g<name>", name) for name in names)
        listed = ", ".join(list(kinds)[:8]) + (" ..." if len(kinds) > 8 else "")
        raise CannotDo(
            f"{len(kinds)} values differ between the source's ranks: {listed}",
            hint="--rank-state drop leaves them out, keep keeps each as NAME@rankR, 0 takes rank"
            " 0's for all",
        )
    return _taken_from(catalog, names, what)


def _left_out(before: Catalog, after: Catalog) -> list[str]:
    """One note that names the state of ranks which --rank-state leaves out."""
    kept = {*after.tensors, *after.objects}
    gone = [n for n in (*before.tensors, *before.objects) if n not in kept]
    gone = [name for name in gone if _RANK_STATE.sub(r"\g<name>", name) not in kept]
    listed = ", ".join(gone[:8]) + (f", and {len(gone) - 8} more" if len(gone) > 8 else "")
    return [f"left out, as it belongs to one rank: {listed}"] if gone else []


def _taken_from(catalog: Catalog, names: list[str], rank: str) -> Catalog:
    mine = {name for name in names if name.endswith(f"@rank{rank}")}
    if not mine:
        raise UsageError(f"--rank-state {rank!r}: stop, keep, drop or a rank of the source")
    kept = rewrite.drop_names(catalog, [name for name in names if name not in mine])
    return rewrite.without_rank(kept, mine)


# Where to


def _sibling(source: Path, mesh: Mesh) -> Path:
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
