"""A DeepSpeed checkpoint: ``latest`` and a folder a tag, or the tag's folder itself.

Read: ZeRO 0 to 3 of DeepSpeed 0.4 to 0.19, BF16_Optimizer, pipeline layers, tensor parallelism
with ``universal_checkpoint_info``, mixtures of experts. Names: ``module.<p>`` (weights in the
training type), ``fp32.<p>`` (masters), ``exp_avg.<p>`` and the optimizer's other states,
``step.<p>``, ``frozen.<p>``, ``buffer.<b>``; ``client_state`` is what the training script added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.errors import Damaged, damaged
from ckptool.formats._assemble import Assembled, assemble
from ckptool.formats._companions import companions
from ckptool.formats._deepspeed_files import (
    LATEST,
    Files,
    find_files,
    holds_model_file,
    require_all,
    tag_folder,
    tags,
)
from ckptool.formats._deepspeed_local import Holding
from ckptool.formats._deepspeed_optimizer import (
    MASTER,
    Partition,
    add_flat_groups,
    add_split_groups,
)
from ckptool.formats._deepspeed_parallel import Grid, merge_into
from ckptool.formats._deepspeed_read import State, all_tensors, read_state, shape_groups
from ckptool.formats._deepspeed_values import (
    engine_leaves,
    optimizer_leaves,
    raw_leaves,
    training_facts,
)
from ckptool.formats._deepspeed_weights import (
    add_frozen_pieces,
    add_layers,
    add_module,
    add_placeholders,
    module_weights,
    trained_shapes,
)
from ckptool.formats._deepspeed_whole import add_whole_optimizer
from ckptool.formats.base import Format, ScanOptions, Source
from ckptool.formats.torch_save import unread_notes


@dataclass(slots=True)
class _Checkpoint:
    """All states of one tag."""

    source: Source
    files: Files
    models: dict[tuple[int, int], State]
    optimizers: dict[tuple[int, int], State]
    grid: Grid
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> State:
        """The model file of the first rank."""
        return self.models[0, 0]

    @property
    def aliases(self) -> dict[str, str]:
        """Tied parameters' other names, to the name that holds the data."""
        return {
            str(alias): str(name)
            for state in self.models.values()
            for alias, name in state.mapping("shared_params").items()
        }

    def partitions(self, mp: int) -> list[Partition]:
        """The optimizer files of one ``mp`` rank, by data-parallel rank."""
        return [
            Partition(self.optimizers[dp, mp].inner("optimizer_state_dict"), dp, self.rank(dp, mp))
            for dp in range(self.grid.data)
            if (dp, mp) in self.optimizers
        ]

    def rank(self, dp: int, mp: int) -> int:
        return self.grid.rank(dp, mp)


def _probe(source: Source) -> bool:
    if LATEST in source.files:
        return bool(tags(source))
    return holds_model_file(source.files)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    folder = tag_folder(source)
    checkpoint = _read(source, find_files(source, folder))
    holdings = [_holding(checkpoint, mp) for mp in range(_model_ranks(checkpoint.grid))]
    found = _assembled(checkpoint, holdings, options)
    if found.problems:
        raise damaged(found.problems, subject=source.root)
    return _catalog(checkpoint, found, folder)


def _model_ranks(grid: Grid) -> int:
    return grid.pipeline * grid.tensor


# Reading


def _read(source: Source, files: Files) -> _Checkpoint:
    if not files.models:
        raise Damaged(f"{source.root}: no file of model states in the folder of the tag")
    models = {ranks: read_state(source, file) for ranks, file in files.models.items()}
    first = models[min(models)]
    optimizers = {ranks: read_state(source, file) for ranks, file in files.optimizers.items()}
    grid = _grid(files, first, optimizers)
    return _Checkpoint(source, files, models, optimizers, grid)


def _grid(files: Files, first: State, optimizers: Mapping[tuple[int, int], State]) -> Grid:
    """The degrees of parallelism; Damaged where the file of a rank is missing."""
    model_ranks = first.count("mp_world_size", 1 + max(mp for _, mp in files.models))
    data = _data_ranks(files, first, optimizers)
    what = "the file of model states"
    require_all(files.models, data if files.stage_3 else 1, model_ranks, what)
    if optimizers:
        require_all(files.optimizers, data, model_ranks, "the file of optimizer states")
    tensor = _tensor_ranks(files, first, model_ranks)
    if model_ranks % tensor:
        raise Damaged(f"{first.file.what}: {model_ranks} model ranks with {tensor} tensor ranks")
    return Grid(model_ranks // tensor, data, tensor)


def _data_ranks(files: Files, first: State, optimizers: Mapping[tuple[int, int], State]) -> int:
    """The number of data-parallel ranks, which partition_count tells for each group of them."""
    if not optimizers:
        if files.stage_3:
            raise Damaged(
                f"{first.file.what}: ZeRO 3 keeps weights in the files of optimizer states, and"
                " none of those is there"
            )
        return first.count("dp_world_size")
    state = optimizers[min(optimizers)].inner("optimizer_state_dict")
    counts = state.fields.get("partition_count")
    if isinstance(counts, list | tuple) and counts and all(type(c) is int for c in counts):
        experts_only = first.count("dp_world_size") if first.fields.get("num_experts") else 1
        return max([*map(int, counts), experts_only])
    return state.count("partition_count", 1 + max(dp for dp, _ in files.optimizers))


def _tensor_ranks(files: Files, first: State, model_ranks: int) -> int:
    """The tensor-parallel degree: stated since 0.19, else by the layers' files, else all ranks."""
    stated = first.inner("checkpoint_parallel_dimensions")
    if stated.fields:
        return stated.count("tp_degree")
    if files.layers:
        return 1 + max(tensor for _, tensor in files.layers)
    return model_ranks


# One model-parallel rank


def _holding(checkpoint: _Checkpoint, mp: int) -> Holding:
    found = Holding()
    if checkpoint.files.stage_3:
        _add_stage_3(found, checkpoint, mp)
    else:
        _add_module_and_optimizer(found, checkpoint, mp)
    for (dp, model_rank), state in checkpoint.models.items():
        if model_rank == mp:
            found.add_leaves(engine_leaves(state, checkpoint.source), checkpoint.rank(dp, mp))
    for partition in checkpoint.partitions(mp):
        found.add_leaves(optimizer_leaves(partition.state, checkpoint.source), partition.rank)
    return found


def _add_stage_3(found: Holding, checkpoint: _Checkpoint, mp: int) -> None:
    grid = checkpoint.grid
    models = [
        Partition(checkpoint.models[dp, mp], dp, checkpoint.rank(dp, mp)) for dp in range(grid.data)
    ]
    add_placeholders(found, models)
    add_frozen_pieces(found, models, grid.data)
    add_split_groups(found, checkpoint.partitions(mp), shape_groups(checkpoint.models[0, mp]))


def _add_module_and_optimizer(found: Holding, checkpoint: _Checkpoint, mp: int) -> None:
    state, rank = checkpoint.models[0, mp], checkpoint.rank(0, mp)
    groups = shape_groups(state)
    trained: set[str] | None = {name for group in groups for name in group} or None
    config = state.inner("ds_config")
    if checkpoint.optimizers:
        data_first = config.fields.get("use_data_before_expert_parallelism") is True
        add_flat_groups(found, checkpoint.partitions(mp), groups, data_first=data_first)
    elif not groups:
        trained = _add_whole_optimizer(found, checkpoint, mp)
    if state.fields.get("module") is not None:
        add_module(found, state, checkpoint.aliases, trained, rank)
    if checkpoint.files.layers and mp < checkpoint.grid.tensor:
        _add_layers(found, checkpoint, mp)
    for (_, _, model_rank), file in checkpoint.files.experts.items():
        if model_rank == mp:
            expert = read_state(checkpoint.source, file)
            for name, vector in all_tensors(expert).items():
                found.add_whole(("module", name), vector, rank)


def _add_layers(found: Holding, checkpoint: _Checkpoint, tensor: int) -> None:
    """Add the layers of all stages that are of one tensor-parallel rank."""
    files, source, grid = checkpoint.files, checkpoint.source, checkpoint.grid
    layers = {n: read_state(source, file) for (n, t), file in files.layers.items() if t == tensor}
    trained: dict[str, tuple[int, ...]] = {}
    buffers: set[str] = set()
    ranks = dict.fromkeys(layers, checkpoint.rank(0, tensor))
    for mp in range(tensor, _model_ranks(grid), grid.tensor):
        shapes = trained_shapes(checkpoint.models[0, mp])
        trained = shapes | trained
        buffers |= set(checkpoint.models[0, mp].names("buffer_names"))
        heads = {name.partition(".")[0] for name in shapes}
        ranks |= {n: checkpoint.rank(0, mp) for n in layers if str(n) in heads}
    add_layers(found, layers, trained, buffers, ranks)


def _add_whole_optimizer(found: Holding, checkpoint: _Checkpoint, mp: int) -> set[str] | None:
    """Add the optimizer of ZeRO 0; the trained parameters, None where nothing tells them."""
    state, source = checkpoint.models[0, mp], checkpoint.source
    if checkpoint.files.expert_optimizers:
        for (expert, model_rank), file in checkpoint.files.expert_optimizers.items():
            if model_rank == mp:
                held = read_state(source, file)
                leaves = raw_leaves(held.fields.get("optimizer"), held, source)
                found.add_leaves(leaves, checkpoint.rank(expert, mp))
        checkpoint.notes.append(_UNNAMED)
        return None
    optimizer = state.fields.get("optimizer")
    if not isinstance(optimizer, dict) or not optimizer:
        return None
    inner, rank = state.inner("optimizer"), checkpoint.rank(0, mp)
    named = add_whole_optimizer(found, inner, module_weights(state), rank)
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


# All ranks together


def _assembled(
    checkpoint: _Checkpoint, holdings: Sequence[Holding], options: ScanOptions
) -> Assembled:
    leaves = {rank: held for holding in holdings for rank, held in holding.leaves.items()}
    found = assemble(leaves, per_rank=options.per_rank)
    info = _universal_info(checkpoint)
    merge_into(found, holdings, checkpoint.grid, info, per_rank=options.per_rank)
    aliases = checkpoint.aliases
    if aliases:
        found.objects["shared_params"] = ObjectEntry("shared_params", ("shared_params",), aliases)
    _add_tied_masters(found, aliases)
    if not checkpoint.optimizers and trained_shapes(checkpoint.model):
        found.conflicts[MASTER] = (
            f"{checkpoint.model.file.what}: was trained with ZeRO, and all files of optimizer"
            " states are missing: no masters and moments; --model-only converts the weights"
        )
    return found


def _universal_info(checkpoint: _Checkpoint) -> Mapping[str, Any]:
    """How tensor-parallel shards fit together, where the training script or DeepSpeed says so."""
    key = "universal_checkpoint_info"
    for state in (*checkpoint.models.values(), *checkpoint.optimizers.values()):
        inner = state.mapping(key) or state.inner("optimizer_state_dict").mapping(key)
        if inner:
            return inner
    return {}


def _add_tied_masters(found: Assembled, aliases: Mapping[str, str]) -> None:
    """Give masters that are the only weights there are (ZeRO 3) their other names, too."""
    for alias, name in aliases.items():
        master = found.tensors.get(f"{MASTER}.{name}")
        if master is not None and f"module.{name}" not in found.tensors:
            other = f"{MASTER}.{alias}"
            found.tensors[other] = replace(master, name=other, path=(MASTER, alias))


def _catalog(checkpoint: _Checkpoint, found: Assembled, folder: str) -> Catalog:
    source, grid = checkpoint.source, checkpoint.grid
    names = [*checkpoint.files.all, *([LATEST] if folder else [])]
    optimizer = checkpoint.partitions(0)[0].state if checkpoint.optimizers else None
    info = training_facts(checkpoint.model, optimizer)
    degrees = {"pp": grid.pipeline, "dp": grid.data, "tp": grid.tensor}
    info |= {name: str(degree) for name, degree in degrees.items()}
    carried = companions(source)
    notes = [*checkpoint.notes, *found.notes, *unread_notes(found.objects)]
    return Catalog(
        "deepspeed",
        found.tensors,
        found.objects,
        {name: source.files[name] for name in names},
        world_size=grid.size,
        info=info,
        notes=(*_other_tags(source, folder), *dict.fromkeys(notes)),
        conflicts=found.conflicts,
        companions={n: size for n, size in carried.items() if not n.startswith("zero_to_")},
    )


def _other_tags(source: Source, folder: str) -> list[str]:
    others = [tag for tag in tags(source) if f"{tag}/" != folder]
    return [f"{folder[:-1]} is the latest tag; also here: {', '.join(others)}"] if others else []


FORMAT = Format(
    "deepspeed",
    "DeepSpeed: ZeRO 0 to 3, pipelines, tensor parallelism, mixtures of experts",
    _probe,
    _scan,
)
