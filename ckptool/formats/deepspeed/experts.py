"""Mixtures of experts: their files, the experts of each rank, and their optimizer without ZeRO.

DeepSpeed (``deepspeed.moe``, 0.5 to 0.19) writes a file per expert, under its global number, and
without ZeRO an optimizer file per expert-parallel rank. A rank's experts are consecutive; the
groups of parameters that contain experts are named ``ep_size_N`` by their degree.

A model file records how many experts each MoE layer has. An expert's file names its parameters with
the expert's number, and its layer's parameters like the model file does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from ckptool.errors import Damaged, Problem
from ckptool.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ckptool.formats.deepspeed.states import (
    State,
    dict_or_empty,
    find_param_groups,
    read_trained_shapes,
)
from ckptool.serialization.source import find_missing_ranks
from ckptool.serialization.state_dict.leaves import PlainLeaf

EXPERT = re.compile(r"(?P<head>.*\bdeepspeed_experts\.)(?P<number>\d+)(?P<tail>\..*)")
_DEGREE = re.compile(r"ep_size_([0-9]{1,6})")
_INSIDE = "experts.deepspeed_experts."
_EXCHANGED = "files were swapped or renumbered: restore their names, or use another copy"
_MOVE = "an earlier save with more experts may have left it: move it away"
_SHOWN = 6
_Key = tuple[int, int]
"""A MoE layer and an expert's number in it."""


def read_experts(checkpoint: DeepSpeedCheckpoint, mp: int) -> Mapping[_Key, State]:
    """Return one model-parallel rank's experts by file; Damaged if one holds another expert."""
    files = {
        (layer, expert): file
        for (layer, expert, model_rank), file in sorted(checkpoint.files.experts.items())
        if model_rank == mp
    }
    states = {key: checkpoint.read_file(file) for key, file in files.items()}
    names = {key: [*map(str, state.fields)] for key, state in states.items()}
    _require_own_names(names, files, list(checkpoint.models[0, mp].inner("module").fields))
    return states


def find_expert_degrees(groups: Any) -> set[int]:
    """Return the degrees of expert parallelism in the names of experts' groups."""
    dicts = map(dict_or_empty, groups if isinstance(groups, list | tuple) else [])
    names = (group.get("name") for group in dicts)
    matches = (_DEGREE.match(name) for name in names if isinstance(name, str))
    return {int(match[1]) for match in matches if match}


def select_experts(
    experts: Mapping[_Key, State], optimizer: State, rank: int
) -> dict[str, PlainLeaf] | None:
    """Return the parameters of one rank's experts, in the order of the module.

    None if layers are spread over different numbers of ranks: the files do not record which.
    """
    inner = optimizer.inner("optimizer_state_dict")  # where DeepSpeed wraps torch's own
    degrees = find_expert_degrees((inner if inner.stored else optimizer).groups())
    if len(degrees) != 1:
        return None
    degree = degrees.pop()
    leaves: dict[str, PlainLeaf] = {}
    for layer in dict.fromkeys(layer for layer, _ in experts):
        keys = [key for key in experts if key[0] == layer]
        share, rest = divmod(len(keys), degree)
        if rest:
            return None
        for key in keys[rank * share : (rank + 1) * share]:
            leaves |= experts[key].tensors
    return leaves


def require_experts(checkpoint: DeepSpeedCheckpoint) -> None:
    """Raise Damaged if the file of an expert is missing, or belongs to a nonexistent expert."""
    files = {(layer, expert): file for (layer, expert, _), file in checkpoint.files.experts.items()}
    counts = _count_experts(checkpoint.model, files)
    experts = ((layer, e) for layer, count in enumerate(counts) for e in range(count))
    missing = list(islice((key for key in experts if key not in files), _SHOWN))
    if missing:  # of as many as the file may say
        names = ", ".join(f"layer_{layer}_expert_{e}" for layer, e in missing)
        more = " and more" * (len(missing) == _SHOWN)
        message = f"the files of {names}{more} are missing: {len(files):,} of {sum(counts):,} are"
        raise Damaged(f"{message} there", "file-missing")
    for (layer, e), file in sorted(files.items()):
        if layer >= len(counts) or e >= counts[layer]:
            message = f"{file}: belongs to no expert of this model, whose MoE layers have {counts}"
            raise Damaged(message, "saves-mixed", file=file, hint=_MOVE)


def _count_experts(model: State, files: Collection[_Key]) -> list[int]:
    """Return how many experts each MoE layer has: as recorded, else as the files are numbered.

    The first versions recorded one number for all layers.
    """
    recorded = model.get("num_experts")
    layers = range(1 + max((layer for layer, _ in files), default=-1))
    if isinstance(recorded, list) and all(type(count) is int for count in recorded):
        return recorded
    if type(recorded) is int and files:
        return [recorded for _ in layers]
    return [1 + max((e for number, e in files if number == layer), default=0) for layer in layers]


def _require_own_names(
    experts: Mapping[_Key, Collection[str]], files: Mapping[_Key, str], module: Collection[str]
) -> None:
    """Raise Damaged if a file contains another expert, or one of another layer, than its name says.

    ``experts`` are the names in the files, ``module`` those of the model file, in order.
    """
    heads: dict[int, str] = {}
    for (layer, expert), names in experts.items():
        for match in filter(None, map(EXPERT.fullmatch, names)):
            head = heads.setdefault(layer, match["head"])
            if int(match["number"]) != expert or match["head"] != head:
                file = files[layer, expert]
                message = f"{file}: holds {match[0]}, not expert {expert} of {head[:-1]}"
                raise Damaged(message, "rank-copied", file=file, hint=_EXCHANGED)
    first = {name: at for at, name in reversed([*enumerate(module)])}
    order = [_place(head, first) for _, head in sorted(heads.items())]
    places = [place for place in order if place is not None]
    if len(set(heads.values())) < len(heads) or places != sorted(places):
        layers = ", ".join(f"layer_{layer} {head[:-1]}" for layer, head in sorted(heads.items()))
        message = f"the experts' files are not in the order of the model's layers: {layers}"
        file = next(iter(files.values()))
        raise Damaged(message, "rank-copied", file=file, hint=_EXCHANGED)


def _place(head: str, first: Mapping[str, int]) -> int | None:
    """Return where in the module the layer's other parameters begin."""
    layer = head.removesuffix(_INSIDE)
    return min((at for name, at in first.items() if name.startswith(layer)), default=None)


def find_lost_optimizers(checkpoint: DeepSpeedCheckpoint) -> Problem | None:
    """Return the expert-parallel rank without an optimizer file, or the file of no rank."""
    files = checkpoint.files
    if not files.experts or checkpoint.optimizers or read_trained_shapes(checkpoint.model):
        return None
    ranks = {rank for rank, _ in files.expert_optimizers}
    first = next(iter(checkpoint.expert_optimizers.values()), None)
    degrees = (
        find_expert_degrees(find_param_groups(first.inner("optimizer").stored)) if first else ()
    )
    degree = max(degrees, default=1 + max(ranks, default=0))
    strays = [file for (rank, _), file in files.expert_optimizers.items() if rank >= degree]
    if strays:
        message = f"{strays[0]}: belongs to no rank of {degree:,} expert-parallel ranks"
        return Problem(message, "saves-mixed", file=strays[0])
    missing = find_missing_ranks(ranks, degree)
    if not missing:
        return None
    names = ", ".join(f"expp_rank_{rank}" for rank in missing)
    message = f"the optimizer's files of {names} are missing: {len(ranks):,} of {degree:,} are"
    message += " there, and each holds some experts' moments; --model-only converts the weights"
    return Problem(message, "rank-missing")
