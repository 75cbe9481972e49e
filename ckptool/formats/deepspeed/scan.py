"""Read a DeepSpeed checkpoint: the content of each rank's files, and one catalog of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.errors import Damaged, Problem, Refusal, damaged
from ckptool.formats.base import ScanOptions
from ckptool.formats.companions import companions
from ckptool.formats.deepspeed.checkpoint import (
    LATEST,
    DeepSpeedCheckpoint,
    RankState,
    find_files,
    find_tag_folder,
    read_checkpoint,
)
from ckptool.formats.deepspeed.experts import (
    find_expert_degrees,
    find_lost_optimizers,
    read_experts,
    require_experts,
)
from ckptool.formats.deepspeed.flat_runs import MASTER, RankContents, Shapes
from ckptool.formats.deepspeed.slice_mappings import read_mapped_groups
from ckptool.formats.deepspeed.states import (
    State,
    dict_or_empty,
    find_param_groups,
    find_zero_stage,
    list_refused_leaves,
    read_engine_leaves,
    read_optimizer_leaves,
    read_shape_groups,
    read_trained_shapes,
    refuse_malformed,
    require_shallow,
)
from ckptool.formats.deepspeed.tensor_parallel import merge_contents, merge_tensor
from ckptool.formats.deepspeed.unpartitioned import add_whole_optimizers
from ckptool.formats.deepspeed.weights import (
    add_frozen_pieces,
    add_layers,
    add_module,
    add_placeholders,
    classify_refused,
    note_excluded,
)
from ckptool.formats.deepspeed.zero_partitions import add_flat_groups, add_split_groups
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled

_OPTIMIZER_FILE = frozenset("optimizer_state_dict ds_config ds_version param_shapes".split())
"""Keys that DeepSpeed writes in a file of optimizer states; shapes up to 0.4."""


@refuse_malformed
def scan(source: Source, options: ScanOptions) -> Catalog:
    """Return the catalog of the latest tag, or of the tag whose folder the source is."""
    folder = find_tag_folder(source, LATEST)
    checkpoint = read_checkpoint(source, find_files(source.files, folder))
    if not checkpoint.files.stage_3:
        require_experts(checkpoint)
    assembled = assemble_contents(checkpoint, read_contents(checkpoint), options)
    if not checkpoint.optimizers and read_trained_shapes(checkpoint.model):
        assembled.conflicts[MASTER] = _report_missing_optimizers(checkpoint)
    problem = find_lost_optimizers(checkpoint)
    if problem is not None:
        assembled.conflicts[MASTER] = problem
    files = [*checkpoint.files.all, *([LATEST] if folder else [])]
    return describe_checkpoint("deepspeed", checkpoint, assembled, files)


def _report_missing_optimizers(checkpoint: DeepSpeedCheckpoint) -> Problem:
    """Return the conflict of weights without masters and moments; Damaged without weights."""
    file = checkpoint.model.file.what
    if checkpoint.files.stage_3:
        raise Damaged(
            f"{file}: ZeRO 3 stores weights in the optimizer states' files, which are all missing",
            "file-missing",
        )
    message = f"{file}: trained with ZeRO, but all files of optimizer states are missing: no"
    message += " masters or moments; --model-only converts the weights"
    return Problem(message, "file-missing")


# What all ranks hold together


def assemble_contents(
    checkpoint: DeepSpeedCheckpoint,
    contents: Sequence[RankContents],
    options: ScanOptions,
    states: RankContents | None = None,
) -> Assembled:
    """Return all ranks' tensors and values, and a universal checkpoint's whole ``states``."""
    content = RankContents()
    for rank_contents in contents:
        for rank, leaves in rank_contents.leaves.items():
            content.add_leaves(leaves, rank)
    assembled = assemble(content.leaves, per_rank=options.per_rank)
    assembled.notes += [note for rank_contents in contents for note in rank_contents.notes]
    info = _find_universal_info(checkpoint) if checkpoint.grid.tensor > 1 else {}
    merge_contents(assembled, contents, checkpoint.grid, info, options)
    aliases = checkpoint.aliases
    if aliases:
        entry = ObjectEntry("shared_params", ("shared_params",), aliases)
        assembled.objects["shared_params"] = entry
    if assembled.problems:
        raise damaged(assembled.problems, subject=checkpoint.source.root)
    if states is not None:
        entries = (merge_tensor(name, {0: shard}) for name, shard in states.tensors.items())
        assembled.tensors |= {entry.name: entry for entry in entries}
    _add_tied_masters(assembled, aliases)
    note_excluded(checkpoint, assembled)
    return assembled


def _find_universal_info(checkpoint: DeepSpeedCheckpoint) -> Mapping[str, Any]:
    """Return how tensor-parallel shards fit, if the training script or DeepSpeed recorded it."""
    key = "universal_checkpoint_info"
    for state in (*checkpoint.models.values(), *checkpoint.optimizers.values()):
        inner = state.mapping(key) or state.inner("optimizer_state_dict").mapping(key)
        if inner:
            return inner
    return {}


def _add_tied_masters(assembled: Assembled, aliases: Mapping[str, str]) -> None:
    """Add tied parameters' masters under all names if they are the only weights (ZeRO 3)."""
    for alias, name in aliases.items():
        master = assembled.tensors.get(f"{MASTER}.{name}")
        if master is not None and f"module.{name}" not in assembled.tensors:
            full = f"{MASTER}.{alias}"
            assembled.tensors[full] = replace(master, name=full, path=(MASTER, alias))


def describe_checkpoint(
    name: str, checkpoint: DeepSpeedCheckpoint, assembled: Assembled, files: Iterable[str]
) -> Catalog:
    """Return the catalog of the assembled content; ``files`` are those of the checkpoint."""
    source, grid = checkpoint.source, checkpoint.grid
    optimizer = checkpoint.first_optimizer
    info = _list_training_facts(checkpoint.model, optimizer)
    stored = optimizer.stored if optimizer else checkpoint.model.stored.get("optimizer")
    degrees = find_expert_degrees(find_param_groups(stored))
    experts = f", EP {max(degrees)}" if degrees else ""
    info["parallelism"] = f"TP {grid.tensor}, PP {grid.pipeline}, DP {grid.data}{experts}"
    carried = {n: size for n, size in companions(source).items() if not n.startswith("zero_to_")}
    assembled.notes[:0] = checkpoint.notes
    return assembled.catalog(
        name, source, files, world_size=grid.size, info=info, companions=carried
    )


def _list_training_facts(model: State, optimizer: State | None) -> dict[str, str]:
    """Return facts about a run for the user: version, stage, precision, offloading."""
    version = model.stored.get("ds_version")
    config = dict_or_empty(model.stored.get("ds_config"))
    zero = dict_or_empty(config.get("zero_optimization"))
    stage = find_zero_stage(model, optimizer)
    facts = {"writer": "DeepSpeed"}
    facts |= {"version": version} if isinstance(version, str) else {}
    facts["ZeRO"] = "stage unknown" if stage is None else f"stage {stage}"
    for precision in ("bf16", "bfloat16", "fp16"):
        if dict_or_empty(config.get(precision)).get("enabled") is True:
            facts["precision"] = precision
    name = dict_or_empty(config.get("optimizer")).get("type")
    if isinstance(name, str):
        facts["optimizer"] = name
    device = dict_or_empty(zero.get("offload_optimizer")).get("device")
    if isinstance(device, str) and device != "none":
        facts["optimizer offloaded to"] = device
    if zero.get("round_robin_gradients") is True:
        facts["gradients"] = "round-robin"
    return facts


# What the files of each rank hold


def read_contents(checkpoint: DeepSpeedCheckpoint) -> list[RankContents]:
    """Return the content of each model-parallel rank's files.

    If one rank's masters and moments cannot be placed, none are: the rest would look complete.
    """
    ranks = range(checkpoint.grid.model)
    contents = [_read_rank(checkpoint, mp, None) for mp in ranks]
    barred = next((rank.barred for rank in contents if rank.barred is not None), None)
    if barred is not None:
        contents = [_read_rank(checkpoint, mp, barred) for mp in ranks]
        contents[0].refuse_masters("model" if checkpoint.files.stage_3 else "optimizer")
    return contents


def _read_rank(checkpoint: DeepSpeedCheckpoint, mp: int, barred: Refusal | None) -> RankContents:
    """Return the content of one model-parallel rank's files, without masters if ``barred``."""
    contents = RankContents(barred=barred)
    add_tensors = _add_stage_3 if checkpoint.files.stage_3 else _add_module_and_optimizer
    trained = add_tensors(contents, checkpoint, mp)
    source = checkpoint.source
    models = checkpoint.select(checkpoint.models, mp)
    for model in models:
        contents.add_leaves(read_engine_leaves(model.state, source), model.rank)
        kinds = classify_refused(model.state, checkpoint.aliases, trained)
        contents.add_leaves(list_refused_leaves(model.state, (), kinds), model.rank)
    _note_values(contents, models)
    for optimizer in checkpoint.select(checkpoint.optimizers, mp):
        strays = {k: v for k, v in optimizer.state.stored.items() if k not in _OPTIMIZER_FILE}
        contents.add_stray(optimizer.state.file.what, strays, optimizer.rank)
    for partition in checkpoint.partitions(mp):
        contents.add_leaves(read_optimizer_leaves(partition.state, source), partition.rank)
        contents.add_leaves(list_refused_leaves(partition.state, ("optimizer",)), partition.rank)
    return contents


def _note_values(contents: RankContents, models: Iterable[RankState]) -> None:
    """Note values of modules that are not plain tensors, by the first file that has each."""
    noted: set[Any] = set()
    for model in models:
        for key in ("module", "frozen_param_fragments"):
            inner = model.state.inner(key)
            if isinstance(inner.readable, Refusal):
                continue
            values = {name: value for name, value in inner.values.items() if name not in noted}
            contents.add_stray(model.state.file.what, values, model.rank, ("module",))
            noted.update(values)


def _add_stage_3(contents: RankContents, checkpoint: DeepSpeedCheckpoint, mp: int) -> set[str]:
    """Add what the files of ZeRO 3 hold; return the names of the trained parameters."""
    models = checkpoint.select(checkpoint.models, mp)
    add_placeholders(contents, models)
    add_frozen_pieces(contents, models)
    shapes = read_shape_groups(checkpoint.models[0, mp])
    contents.attempt(add_split_groups, checkpoint, mp, shapes)
    return {name for group in shapes for name in group}


def _add_partitions(
    contents: RankContents, checkpoint: DeepSpeedCheckpoint, mp: int, groups: Sequence[Shapes]
) -> set[str]:
    """Add what the optimizer's files of ZeRO 1 and 2 hold; return the trained parameters."""
    groups = groups or read_mapped_groups(checkpoint, mp)
    add_flat_groups(contents, checkpoint, mp, groups)
    return {name for group in groups for name in group}


def _add_module_and_optimizer(
    contents: RankContents, checkpoint: DeepSpeedCheckpoint, mp: int
) -> set[str] | None:
    """Add the content of one rank's files; return the trained parameters if known."""
    state, rank = checkpoint.models[0, mp], checkpoint.grid.rank(0, mp)
    groups = read_shape_groups(state)
    trained: set[str] | None = {name for group in groups for name in group} or None
    if checkpoint.optimizers:
        trained = contents.attempt(_add_partitions, checkpoint, mp, groups) or trained
    elif not groups:
        trained = contents.attempt(add_whole_optimizers, checkpoint, mp)
        for of_expert in checkpoint.select(checkpoint.expert_optimizers, mp):
            leaves = list_refused_leaves(of_expert.state, ("optimizer",))
            contents.add_leaves(leaves, of_expert.rank)
    if require_shallow(state.fields.get("module")) is not None:
        add_module(contents, state, checkpoint.aliases, trained, rank)
    if checkpoint.files.layers and mp < checkpoint.grid.tensor:
        add_layers(contents, checkpoint, mp)
    for expert in read_experts(checkpoint, mp).values():
        for name, vector in expert.tensors.items():
            contents.add_whole(("module", name), vector, rank)
        contents.add_leaves(list_refused_leaves(expert, ("module",)), rank)
        contents.add_stray(expert.file.what, expert.values, rank, ("module",))
    return trained
