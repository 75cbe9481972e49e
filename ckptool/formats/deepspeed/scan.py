"""Read a DeepSpeed checkpoint: files, then ranks, then what they hold together.

From what all ranks of a DeepSpeed checkpoint hold to a catalog.

What the files of each model-parallel rank hold: weights, optimizer, values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.errors import Damaged, Problem, Refusal, damaged
from ckptool.formats.base import ScanOptions
from ckptool.formats.companions import companions
from ckptool.formats.deepspeed.checkpoint import Checkpoint, merge_into, read_checkpoint
from ckptool.formats.deepspeed.experts import (
    add_expert_optimizers,
    experts_of,
    lost_optimizers,
    refused_of_experts,
    require_experts,
)
from ckptool.formats.deepspeed.files import LATEST, find_files, tag_folder
from ckptool.formats.deepspeed.frozen import note_excluded
from ckptool.formats.deepspeed.partitions import MASTER, Partition, RankContents, Shapes
from ckptool.formats.deepspeed.states import (
    State,
    all_tensors,
    read_state,
    require_all_tensors,
    require_shallow,
    shape_groups,
    values_of,
)
from ckptool.formats.deepspeed.unpartitioned import add_whole_optimizer
from ckptool.formats.deepspeed.values import (
    engine_leaves,
    expert_degrees,
    optimizer_leaves,
    param_groups,
    raw_leaves,
    refused_leaves,
    training_facts,
)
from ckptool.formats.deepspeed.weights import (
    add_frozen_pieces,
    add_layers,
    add_module,
    add_placeholders,
    module_weights,
    refused_kinds,
    trained_shapes,
)
from ckptool.formats.deepspeed.zero import add_flat_groups, add_split_groups
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled
from ckptool.serialization.state_dict.values import stray_notes, unread_notes


def scan(source: Source, options: ScanOptions) -> Catalog:
    """Return the catalog of the latest tag, or of the tag whose folder the source is."""
    folder = tag_folder(source, LATEST)
    checkpoint = read_checkpoint(source, find_files(source.files, folder))
    if not checkpoint.files.stage_3:
        require_experts(checkpoint)
    holdings = all_holdings(checkpoint)
    found = assembled(checkpoint, holdings, options)
    add_tied_masters(found, checkpoint.aliases)
    note_excluded(checkpoint, found)
    if not checkpoint.optimizers and trained_shapes(checkpoint.model):
        _miss_optimizers(checkpoint, found)
    lost = lost_optimizers(checkpoint)
    if lost is not None:
        found.conflicts[MASTER] = lost
    files = [*checkpoint.files.all, *([LATEST] if folder else [])]
    return catalog_of("deepspeed", checkpoint, found, files)


def _miss_optimizers(checkpoint: Checkpoint, found: Assembled) -> None:
    """A conflict where the weights are there without masters and moments; else Damaged."""
    what = checkpoint.model.file.what
    if checkpoint.files.stage_3:
        raise Damaged(
            f"{what}: ZeRO 3 keeps weights in the files of optimizer states, and none of those"
            " is there",
            "file-missing",
        )
    message = f"{what}: was trained with ZeRO, and all files of optimizer states are missing: no"
    message += " masters and moments; --model-only converts the weights"
    found.conflicts[MASTER] = Problem(message, "file-missing")


def assembled(
    checkpoint: Checkpoint, holdings: Sequence[RankContents], options: ScanOptions
) -> Assembled:
    """Return all model-parallel ranks' tensors and values. Raises Damaged where they contradict."""
    every = RankContents()
    for holding in holdings:
        for rank, held in holding.leaves.items():
            every.add_leaves(held, rank)
    found = assemble(every.leaves, per_rank=options.per_rank)
    found.notes += [note for holding in holdings for note in holding.notes]
    info = _universal_info(checkpoint) if checkpoint.grid.tensor > 1 else {}
    merge_into(found, holdings, checkpoint.grid, info, options)
    aliases = checkpoint.aliases
    if aliases:
        found.objects["shared_params"] = ObjectEntry("shared_params", ("shared_params",), aliases)
    if found.problems:
        raise damaged(found.problems, subject=checkpoint.source.root)
    return found


def _universal_info(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """How tensor-parallel shards fit together, where the training script or DeepSpeed says so."""
    key = "universal_checkpoint_info"
    for state in (*checkpoint.models.values(), *checkpoint.optimizers.values()):
        inner = state.mapping(key) or state.inner("optimizer_state_dict").mapping(key)
        if inner:
            return inner
    return {}


def add_tied_masters(found: Assembled, aliases: Mapping[str, str]) -> None:
    """Give masters that are the only weights there are (ZeRO 3) their other names, too."""
    for alias, name in aliases.items():
        master = found.tensors.get(f"{MASTER}.{name}")
        if master is not None and f"module.{name}" not in found.tensors:
            other = f"{MASTER}.{alias}"
            found.tensors[other] = replace(master, name=other, path=(MASTER, alias))


def catalog_of(
    name: str, checkpoint: Checkpoint, found: Assembled, files: Iterable[str]
) -> Catalog:
    """Return the catalog of what was assembled; ``files`` are those of the checkpoint."""
    source, grid = checkpoint.source, checkpoint.grid
    optimizer = checkpoint.partitions(0)[0].state if checkpoint.optimizers else None
    info = training_facts(checkpoint.model, optimizer)
    stored = optimizer.stored if optimizer else checkpoint.model.stored.get("optimizer")
    degrees = expert_degrees(param_groups(stored))
    experts = f", EP {max(degrees)}" if degrees else ""
    info["parallelism"] = f"TP {grid.tensor}, PP {grid.pipeline}, DP {grid.data}{experts}"
    files = list(files)
    carried = {n: size for n, size in companions(source).items() if not n.startswith("zero_to_")}
    notes = [*checkpoint.notes, *found.notes, *unread_notes(found.objects)]
    return Catalog(
        name,
        found.tensors,
        found.objects,
        {file: source.files[file] for file in files},
        world_size=grid.size,
        info=info,
        notes=tuple(dict.fromkeys(notes)),
        conflicts=found.conflicts,
        companions=carried,
    )


_OPTIMIZER_FILE = frozenset("optimizer_state_dict ds_config ds_version param_shapes".split())
"""What DeepSpeed writes in a file of optimizer states; shapes up to 0.4."""


def all_holdings(checkpoint: Checkpoint) -> list[RankContents]:
    """Return what the files of each model-parallel rank hold.

    Where one rank's masters and moments cannot be placed, none are: what is left would look whole.
    """
    ranks = range(checkpoint.grid.model)
    holdings = [_holding_of(checkpoint, mp, None) for mp in ranks]
    barred = next((holding.barred for holding in holdings if holding.barred is not None), None)
    if barred is not None:
        holdings = [_holding_of(checkpoint, mp, barred) for mp in ranks]
        holdings[0].refuse_masters("model" if checkpoint.files.stage_3 else "optimizer")
    return holdings


def _holding_of(checkpoint: Checkpoint, mp: int, barred: Refusal | None) -> RankContents:
    found = RankContents(barred=barred)
    trained: set[str] | None
    if checkpoint.files.stage_3:
        trained = _add_stage_3(found, checkpoint, mp)
    else:
        trained = _add_module_and_optimizer(found, checkpoint, mp)
    for (dp, model_rank), state in checkpoint.models.items():
        if model_rank == mp:
            found.add_leaves(engine_leaves(state, checkpoint.source), checkpoint.rank(dp, mp))
            kinds = refused_kinds(state, checkpoint.aliases, trained)
            found.add_leaves(refused_leaves(state, (), kinds), checkpoint.rank(dp, mp))
    _note_values(found, [s for (_, rank), s in checkpoint.models.items() if rank == mp])
    for (_, model_rank), optimizer in checkpoint.optimizers.items():
        if model_rank == mp:
            found.notes += stray_notes(
                optimizer.file.what, optimizer.stored.keys() - _OPTIMIZER_FILE
            )
    for partition in checkpoint.partitions(mp):
        found.add_leaves(optimizer_leaves(partition.state, checkpoint.source), partition.rank)
        found.add_leaves(refused_leaves(partition.state, ("optimizer",)), partition.rank)
    return found


def _note_values(found: RankContents, states: Iterable[State]) -> None:
    """Note what is no plain tensor where states hold a module's, by the first file that has it."""
    noted: set[Any] = set()
    for state in states:
        for key in ("module", "frozen_param_fragments"):
            inner = state.inner(key)
            if isinstance(inner.readable, Refusal):
                continue
            names = [name for name in values_of(inner) if name not in noted]
            found.notes += stray_notes(state.file.what, names)
            noted.update(names)


def _add_stage_3(found: RankContents, checkpoint: Checkpoint, mp: int) -> set[str]:
    """Add what the files of ZeRO 3 hold; return the names of the trained parameters."""
    grid = checkpoint.grid
    models = [
        Partition(checkpoint.models[dp, mp], dp, checkpoint.rank(dp, mp)) for dp in range(grid.data)
    ]
    add_placeholders(found, models)
    add_frozen_pieces(found, models, grid.data)
    shapes = shape_groups(checkpoint.models[0, mp])
    work = partial(add_split_groups, ranks=checkpoint.partitions(mp), groups=shapes)
    found.attempt(work)
    return {name for group in shapes for name in group}


def _add_module_and_optimizer(
    found: RankContents, checkpoint: Checkpoint, mp: int
) -> set[str] | None:
    """Add what the files of one rank hold; return the trained parameters where that is known."""
    state, rank = checkpoint.models[0, mp], checkpoint.rank(0, mp)
    groups = shape_groups(state)
    trained: set[str] | None = {name for group in groups for name in group} or None
    if checkpoint.optimizers:
        found.attempt(partial(_add_flat_groups, checkpoint, mp, groups))
    elif not groups:
        trained = found.attempt(partial(_add_whole_optimizer, checkpoint, mp))
        for number, leaves in refused_of_experts(checkpoint, mp):
            found.add_leaves(leaves, number)
    if require_shallow(state.fields.get("module")) is not None:
        add_module(found, state, checkpoint.aliases, trained, rank)
    if checkpoint.files.layers and mp < checkpoint.grid.tensor:
        _add_layers(found, checkpoint, mp)
    for expert in experts_of(checkpoint, mp).values():
        for name, vector in all_tensors(expert).items():
            found.add_whole(("module", name), vector, rank)
        found.add_leaves(refused_leaves(expert, ("module",)), rank)
        found.notes += stray_notes(expert.file.what, values_of(expert))
    return trained


def _add_flat_groups(
    checkpoint: Checkpoint, mp: int, groups: Sequence[Shapes], found: RankContents
) -> None:
    config = checkpoint.models[0, mp].inner("ds_config")
    data_first = config.get("use_data_before_expert_parallelism") is True
    add_flat_groups(found, checkpoint.partitions(mp), groups, data_first=data_first)


def _add_layers(found: RankContents, checkpoint: Checkpoint, tensor: int) -> None:
    """Add the layers of all stages that are of one tensor-parallel rank."""
    files, source, grid = checkpoint.files, checkpoint.source, checkpoint.grid
    own = {n: file for (n, t), file in files.layers.items() if t == tensor}
    layers = {n: read_state(source, file) for n, file in own.items()}
    trained: dict[str, tuple[int, ...]] = {}
    buffers: set[str] = set()
    ranks = dict.fromkeys(layers, checkpoint.rank(0, tensor))
    for mp in range(tensor, grid.model, grid.tensor):
        shapes = trained_shapes(checkpoint.models[0, mp])
        trained = shapes | trained
        buffers |= set(checkpoint.models[0, mp].names("buffer_names"))
        heads = {name.partition(".")[0] for name in shapes}
        ranks |= {n: checkpoint.rank(0, mp) for n in layers if str(n) in heads}
    add_layers(found, layers, trained, buffers, ranks)
    for n, state in layers.items():
        found.add_leaves(refused_leaves(state, ("module", str(n))), ranks[n])
        found.notes += stray_notes(state.file.what, values_of(state))


def _add_whole_optimizer(checkpoint: Checkpoint, mp: int, found: RankContents) -> set[str] | None:
    """Add the optimizer of ZeRO 0; the trained parameters, None where nothing tells them."""
    state, source = checkpoint.models[0, mp], checkpoint.source
    if lost_optimizers(checkpoint) is not None:
        return None
    if checkpoint.files.expert_optimizers:
        named_experts = add_expert_optimizers(found, checkpoint, mp)
        checkpoint.notes.append(_UNNAMED if named_experts is None else _BY_ORDER)
        return named_experts
    optimizer = state.stored.get("optimizer")
    if not isinstance(optimizer, dict) or not optimizer:
        return None
    inner, rank = state.inner("optimizer"), checkpoint.rank(0, mp)
    require_all_tensors(state.inner("module"))
    weights = module_weights(state)
    named = add_whole_optimizer(found, inner, weights, rank)
    if len(named or ()) < len(weights):
        require_all_tensors(state.inner("module"), values=True)
    if named is None:
        found.add_leaves(raw_leaves(optimizer, state, source), rank)
        checkpoint.notes.append(_UNNAMED)
        return None
    found.add_leaves(optimizer_leaves(inner, source), rank)
    checkpoint.notes.append(_BY_ORDER)
    return set(named)


_UNNAMED = (
    "without ZeRO the optimizer's parameters are numbers, and their shapes fit several names:"
    " they are kept as optimizer.state.<number>"
)
_BY_ORDER = (
    "without ZeRO the optimizer's parameters are numbers: their names follow from their order"
    " and shapes"
)
