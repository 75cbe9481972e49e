"""What the files of each model-parallel rank hold: weights, optimizer, values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckptool.errors import Refusal
from ckptool.formats._deepspeed_checkpoint import Checkpoint
from ckptool.formats._deepspeed_expert_files import lost_optimizers
from ckptool.formats._deepspeed_experts import (
    add_expert_optimizers,
    experts_of,
    refused_of_experts,
)
from ckptool.formats._deepspeed_flat import Shapes
from ckptool.formats._deepspeed_local import Holding
from ckptool.formats._deepspeed_optimizer import add_flat_groups
from ckptool.formats._deepspeed_read import (
    all_tensors,
    read_state,
    require_all_tensors,
    require_shallow,
    shape_groups,
    values_of,
)
from ckptool.formats._deepspeed_slots import Partition
from ckptool.formats._deepspeed_values import (
    engine_leaves,
    optimizer_leaves,
    raw_leaves,
    refused_leaves,
)
from ckptool.formats._deepspeed_weights import (
    add_frozen_pieces,
    add_layers,
    add_module,
    add_placeholders,
    module_weights,
    refused_kinds,
    trained_shapes,
)
from ckptool.formats._deepspeed_whole import add_whole_optimizer
from ckptool.formats._deepspeed_zero_3 import add_split_groups
from ckptool.formats._values import stray_notes

_OPTIMIZER_FILE = frozenset("optimizer_state_dict ds_config ds_version param_shapes".split())
"""What DeepSpeed writes in a file of optimizer states; shapes up to 0.4."""


def all_holdings(checkpoint: Checkpoint) -> list[Holding]:
    """What the files of each model-parallel rank hold.

    Where one rank's masters and moments cannot be placed, none are: what is left would look whole.
    """
    ranks = range(checkpoint.grid.model)
    holdings = [_holding_of(checkpoint, mp, None) for mp in ranks]
    barred = next((holding.barred for holding in holdings if holding.barred is not None), None)
    if barred is not None:
        holdings = [_holding_of(checkpoint, mp, barred) for mp in ranks]
        holdings[0].refuse_masters("model" if checkpoint.files.stage_3 else "optimizer")
    return holdings


def _holding_of(checkpoint: Checkpoint, mp: int, barred: Refusal | None) -> Holding:
    found = Holding(barred=barred)
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
    for (_, model_rank), optimizer in checkpoint.optimizers.items():
        if model_rank == mp:
            found.notes += stray_notes(
                optimizer.file.what, optimizer.stored.keys() - _OPTIMIZER_FILE
            )
    for partition in checkpoint.partitions(mp):
        found.add_leaves(optimizer_leaves(partition.state, checkpoint.source), partition.rank)
        found.add_leaves(refused_leaves(partition.state, ("optimizer",)), partition.rank)
    return found


def _add_stage_3(found: Holding, checkpoint: Checkpoint, mp: int) -> set[str]:
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


def _add_module_and_optimizer(found: Holding, checkpoint: Checkpoint, mp: int) -> set[str] | None:
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
    checkpoint: Checkpoint, mp: int, groups: Sequence[Shapes], found: Holding
) -> None:
    config = checkpoint.models[0, mp].inner("ds_config")
    data_first = config.get("use_data_before_expert_parallelism") is True
    add_flat_groups(found, checkpoint.partitions(mp), groups, data_first=data_first)


def _add_layers(found: Holding, checkpoint: Checkpoint, tensor: int) -> None:
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


def _add_whole_optimizer(checkpoint: Checkpoint, mp: int, found: Holding) -> set[str] | None:
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
