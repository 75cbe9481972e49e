"""Mixtures of experts: which rank's experts are which, and their optimizer without ZeRO.

DeepSpeed (``deepspeed.moe``, 0.5 to 0.19) writes a file an expert, under its global number, and
without ZeRO an optimizer's file an expert-parallel rank. A rank's experts are consecutive ones; the
groups of parameters that hold experts are called ``ep_size_N`` by their degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.formats._deepspeed_checkpoint import Checkpoint
from ckptool.formats._deepspeed_expert_files import require_own_names
from ckptool.formats._deepspeed_local import Holding
from ckptool.formats._deepspeed_read import (
    State,
    Vector,
    all_tensors,
    read_optimizer,
    read_state,
    require_all_tensors,
)
from ckptool.formats._deepspeed_values import (
    expert_degrees,
    optimizer_leaves,
    raw_leaves,
    refused_leaves,
)
from ckptool.formats._deepspeed_weights import module_weights
from ckptool.formats._deepspeed_whole import add_whole_optimizer
from ckptool.formats._leaves import Leaf
from ckptool.formats._values import stray_notes

Experts = Mapping[tuple[int, int], Mapping[str, Vector]]
"""Tensors by name, of each MoE layer's expert of a global number."""


def experts_of(checkpoint: Checkpoint, mp: int) -> Mapping[tuple[int, int], State]:
    """The files of all experts, as one model-parallel rank holds them.

    Raises Damaged where a file holds another expert than its name says.
    """
    files = {
        (layer, expert): file
        for (layer, expert, model_rank), file in sorted(checkpoint.files.experts.items())
        if model_rank == mp
    }
    found = {key: read_state(checkpoint.source, file) for key, file in files.items()}
    names = {key: [*map(str, state.fields)] for key, state in found.items()}
    require_own_names(names, files, list(checkpoint.models[0, mp].inner("module").fields))
    return found


def add_expert_optimizers(found: Holding, checkpoint: Checkpoint, mp: int) -> set[str] | None:
    """Add each expert-parallel rank's optimizer; the trained parameters are returned.

    None where their names are not known: what the files hold is then added under its numbers.
    """
    model = checkpoint.models[0, mp]
    files = experts_of(checkpoint, mp)
    require_all_tensors(model.inner("module"), *files.values())
    weights = module_weights(model)
    experts = {key: all_tensors(state) for key, state in files.items()}
    trained: set[str] = set()
    unnamed = False
    for (expert_rank, model_rank), file in checkpoint.files.expert_optimizers.items():
        if model_rank != mp:
            continue
        held = read_optimizer(checkpoint.source, file)
        found.notes += stray_notes(file, held.stored.keys() - {"optimizer"})
        inner, rank = held.inner("optimizer"), checkpoint.rank(expert_rank, mp)
        own = _experts_of_rank(experts, inner, expert_rank)
        named = None if own is None else add_whole_optimizer(found, inner, weights, rank, own)
        if len(named or ()) < len(weights) + len(own or ()):
            require_all_tensors(model.inner("module"), *files.values(), values=True)
        if named is None:
            leaves = raw_leaves(inner.stored, held, checkpoint.source)
            unnamed = True
        else:
            leaves = optimizer_leaves(inner, checkpoint.source)
            trained |= set(named)
        found.add_leaves(leaves, rank)
    return None if unnamed else trained


def refused_of_experts(checkpoint: Checkpoint, mp: int) -> Iterator[tuple[int, dict[str, Leaf]]]:
    """Yield what is refused of each expert-parallel rank's optimizer, with the rank."""
    for (expert_rank, model_rank), file in checkpoint.files.expert_optimizers.items():
        if model_rank == mp:
            leaves = refused_leaves(read_optimizer(checkpoint.source, file), ("optimizer",))
            yield checkpoint.rank(expert_rank, mp), leaves


def _naming_groups(optimizer: State) -> list[dict[str, Any]]:
    """The groups of torch's own optimizer, or of the one that DeepSpeed wraps."""
    inner = optimizer.inner("optimizer_state_dict")
    return inner.groups() if inner.stored else optimizer.groups()


def _experts_of_rank(experts: Experts, optimizer: State, rank: int) -> dict[str, Vector] | None:
    """The parameters of one rank's experts, in the order of the module.

    None where layers are spread over several numbers of ranks: nothing says which over how many.
    """
    degrees = expert_degrees(_naming_groups(optimizer))
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
