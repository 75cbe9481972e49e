"""Whether the files of a mixture of experts are all there, each what its name says.

A model file since DeepSpeed 0.5 records how many experts each MoE layer has. An expert's file names
its parameters with the expert's number, and its layer's parameters like the model file does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_checkpoint import Checkpoint
from ckptool.formats._deepspeed_read import State, read_optimizer
from ckptool.formats._deepspeed_values import expert_degrees, param_groups
from ckptool.formats._deepspeed_weights import trained_shapes
from ckptool.formats.base import first_missing

EXPERT = re.compile(r"(?P<head>.*\bdeepspeed_experts\.)(?P<number>\d+)(?P<tail>\..*)")
_INSIDE = "experts.deepspeed_experts."
_EXCHANGED = "files were exchanged or given other numbers: put them back, or take another copy"
_MOVE = "an earlier save with more experts left it behind? move it away"


def require_experts(checkpoint: Checkpoint) -> None:
    """Damaged where the file of an expert is missing, or is of an expert there is none of."""
    files = {(layer, expert): file for (layer, expert, _), file in checkpoint.files.experts.items()}
    counts = _counts(checkpoint.model, files)
    wanted = {(layer, e) for layer, count in enumerate(counts) for e in range(count)}
    missing = sorted(wanted - files.keys())
    if missing:
        named = ", ".join(f"layer_{layer}_expert_{e}" for layer, e in missing[:6])
        more = f" and {len(missing) - 6:,} more" if len(missing) > 6 else ""
        message = (
            f"the files of {named}{more} are missing: {len(files):,} of {len(wanted):,} are there"
        )
        raise Damaged(Problem(message, "file-missing"))
    for key in sorted(files.keys() - wanted):
        message = f"{files[key]}: is of no expert of this model, whose MoE layers have {counts}"
        raise Damaged(Problem(message, "saves-mixed", file=files[key]), hint=_MOVE)


def _counts(model: State, found: Collection[tuple[int, int]]) -> list[int]:
    """How many experts each MoE layer has: as recorded, else as far as the files are numbered.

    The first versions recorded one number for all layers.
    """
    recorded = model.get("num_experts")
    layers = range(1 + max((layer for layer, _ in found), default=-1))
    if isinstance(recorded, list) and all(type(count) is int for count in recorded):
        return recorded
    if type(recorded) is int and found:
        return [recorded for _ in layers]
    return [1 + max((e for layer, e in found if layer == one), default=0) for one in layers]


def require_own_names(
    experts: Mapping[tuple[int, int], Collection[str]], files: Mapping[tuple[int, int], str],
    module: Collection[str],
) -> None:  # fmt: skip
    """Damaged where a file holds another expert, or one of another layer, than its name says."""
    heads: dict[int, str] = {}
    for (layer, expert), held in experts.items():
        for match in filter(None, map(EXPERT.fullmatch, held)):
            head = heads.setdefault(layer, match["head"])
            if int(match["number"]) != expert or match["head"] != head:
                message = f"{files[layer, expert]}: holds {match[0]}, not expert {expert} of"
                raise _exchanged(f"{message} {head[:-1]}", files[layer, expert])
    first = {name: at for at, name in reversed([*enumerate(module)])}
    order = [_place(head, first) for _, head in sorted(heads.items())]
    known = [place for place in order if place is not None]
    if len(set(heads.values())) < len(heads) or known != sorted(known):
        layers = ", ".join(f"layer_{layer} {head[:-1]}" for layer, head in sorted(heads.items()))
        message = f"the experts' files are not in the order of the model's layers: {layers}"
        raise _exchanged(message, next(iter(files.values())))


def _place(head: str, first: Mapping[str, int]) -> int | None:
    """Where in the module the layer's other parameters begin."""
    layer = head.removesuffix(_INSIDE)
    return min((at for name, at in first.items() if name.startswith(layer)), default=None)


def _exchanged(message: str, file: str) -> Damaged:
    return Damaged(Problem(message, "rank-copied", file=file), hint=_EXCHANGED)


def lost_optimizers(checkpoint: Checkpoint) -> Problem | None:
    """Which expert-parallel rank lacks its optimizer's file, or what file is of no rank."""
    files = checkpoint.files
    if not files.experts or checkpoint.optimizers or trained_shapes(checkpoint.model):
        return None
    ranks = {rank for rank, _ in files.expert_optimizers}
    degrees: set[int] = set()
    if ranks:
        state = read_optimizer(checkpoint.source, next(iter(files.expert_optimizers.values())))
        degrees = expert_degrees(param_groups(state.inner("optimizer").stored))
    degree = max(degrees, default=1 + max(ranks, default=0))
    stray = [file for (rank, _), file in files.expert_optimizers.items() if rank >= degree]
    if stray:
        message = f"{stray[0]}: is of no rank of {degree:,} expert-parallel ones"
        return Problem(message, "saves-mixed", file=stray[0])
    missing = first_missing(ranks, degree)
    if not missing:
        return None
    named = ", ".join(f"expp_rank_{rank}" for rank in missing)
    message = f"the optimizer's files of {named} are missing: {len(ranks):,} of {degree:,} are"
    message += " there, and each holds some experts' moments; --model-only converts the weights"
    return Problem(message, "rank-missing")
