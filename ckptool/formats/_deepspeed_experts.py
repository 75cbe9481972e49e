"""Mixtures of experts: which rank's experts are which, and their optimizer without ZeRO.

DeepSpeed (``deepspeed.moe``, 0.5 to 0.19) writes a file an expert, under its global number, and
without ZeRO an optimizer's file an expert-parallel rank. A rank's experts are consecutive ones; the
groups of parameters that hold experts are called ``ep_size_N`` by their degree.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptool.formats._deepspeed_checkpoint import Checkpoint
from ckptool.formats._deepspeed_expert_files import require_own_names
from ckptool.formats._deepspeed_local import Holding
from ckptool.formats._deepspeed_read import State, Vector, all_tensors, read_state
from ckptool.formats._deepspeed_values import (
    expert_degrees,
    optimizer_leaves,
    param_groups,
    raw_leaves,
)
from ckptool.formats._deepspeed_weights import module_weights
from ckptool.formats._deepspeed_whole import add_whole_optimizer

Experts = Mapping[tuple[int, int], Mapping[str, Vector]]
"""Tensors by name, of each MoE layer's expert of a global number."""


def experts_of(checkpoint: Checkpoint, mp: int) -> Experts:
    """The weights of all experts, as one model-parallel rank holds them.

    Raises Damaged where a file holds another expert than its name says.
    """
    files = {
        (layer, expert): file
        for (layer, expert, model_rank), file in sorted(checkpoint.files.experts.items())
        if model_rank == mp
    }
    found = {key: all_tensors(read_state(checkpoint.source, file)) for key, file in files.items()}
    require_own_names(found, files, list(checkpoint.models[0, mp].mapping("module")))
    return found


def add_expert_optimizers(found: Holding, checkpoint: Checkpoint, mp: int) -> set[str] | None:
    """Add each expert-parallel rank's optimizer; the trained parameters are returned.

    None where their names are not known: what the files hold is then added under its numbers.
    """
    weights = module_weights(checkpoint.models[0, mp])
    experts = experts_of(checkpoint, mp)
    trained: set[str] = set()
    unnamed = False
    for (expert_rank, model_rank), file in checkpoint.files.expert_optimizers.items():
        if model_rank != mp:
            continue
        held = read_state(checkpoint.source, file)
        inner, rank = held.inner("optimizer"), checkpoint.rank(expert_rank, mp)
        own = _experts_of_rank(experts, inner, expert_rank)
        named = None if own is None else add_whole_optimizer(found, inner, weights, rank, own)
        if named is None:
            leaves = raw_leaves(inner.fields, held, checkpoint.source)
            unnamed = True
        else:
            leaves = optimizer_leaves(inner, checkpoint.source)
            trained |= set(named)
        found.add_leaves(leaves, rank)
    return None if unnamed else trained


def _experts_of_rank(experts: Experts, optimizer: State, rank: int) -> dict[str, Vector] | None:
    """The parameters of one rank's experts, in the order of the module.

    None where layers are spread over several numbers of ranks: nothing says which over how many.
    """
    degrees = expert_degrees(param_groups(optimizer))
    if len(degrees) != 1:
        return None
    degree = degrees.pop()
    found: dict[str, Vector] = {}
    for layer in dict.fromkeys(layer for layer, _ in experts):
        numbers = [number for held, number in experts if held == layer]
        each, rest = divmod(len(numbers), degree)
        if rest:
            return None
        for number in numbers[rank * each : (rank + 1) * each]:
            found |= experts[layer, number]
    return found
