"""The fused experts of vLLM's ``FusedMoE`` (commit 01ed47b4): one tensor for all that a rank holds.

``w13_weight`` is ``[experts, gate then up, hidden]``, ``w2_weight`` ``[experts, hidden, inner]``.
Tensor-parallel ranks cut the inner size of each expert, expert-parallel ones the experts; the sizes
in ``config.json`` tell which. What comes out has the names of Hugging Face's unfused experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.view import narrowed
from ckptool.errors import CannotDo, Damaged
from ckptool.formats._frameworks import CONFIG, size_in
from ckptool.formats._tensor_parallel import Local, Locals, halves, joined, single

EXPERTS = re.compile(r"(?P<head>(.*\.)?experts\.)(routed_experts\.)?(?P<which>w13|w2)_weight")
NOTE = (
    "fused experts are read as vLLM's Triton kernels keep them, the gate before up; FlashInfer's"
    " keep them the other way round, and the files do not say which it was"
)
_MEMBERS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """How many experts there are, and their inner size; None where ``config.json`` is silent."""

    experts: int | None = None
    inner: int | None = None


def expert_sizes(config: Mapping[str, Any]) -> ExpertSizes:
    """The sizes as Mixtral, Qwen, DeepSeek and their like call them."""
    counts = (size_in(config, key) for key in ("num_experts", "n_routed_experts"))
    inner = (size_in(config, key) for key in ("moe_intermediate_size", "intermediate_size"))
    experts = next(filter(None, counts), None) or size_in(config, "num_local_experts")
    return ExpertSizes(experts, next(filter(None, inner), None))


def expert_entries(
    name: str, match: re.Match[str], parts: Locals, sizes: ExpertSizes, world: int
) -> Iterator[TensorEntry]:
    """One tensor for each expert and projection.

    Raises CannotDo where nothing says how the ranks share the experts; Damaged where the ranks'
    tensors contradict one another.
    """
    members = _MEMBERS[match["which"]]
    by_expert = _by_expert(name, parts, sizes, world, gated=len(members) == 2)
    mixtral = "block_sparse_moe." in match["head"]
    for number, held in enumerate(by_expert):
        for at, member in enumerate(members):
            own = halves(name, held, at) if len(members) == 2 else held
            leaf = _MIXTRAL[member] if mixtral else member
            full = f"{match['head']}{number}.{leaf}.weight"
            if len(own) == 1:
                yield single(full, *own.items())
            else:
                yield joined(full, (full,), own, 2 - len(members), world=world)


def _by_expert(
    name: str, parts: Locals, sizes: ExpertSizes, world: int, *, gated: bool
) -> list[Locals]:
    """Each expert's parts by rank: of every rank, or of the one that holds the expert."""
    shapes = {part.shape for part in parts.values()}
    shape = next(iter(shapes))
    if len(shapes) != 1 or len(parts) != world or len(shape) != 3:
        raise Damaged(f"{name}: the ranks hold fused experts of several shapes")
    inner = shape[1] // 2 if gated else shape[2]
    if sizes.experts == shape[0] * world and sizes.inner in (None, inner):
        return [{r: _expert(p, n)} for r, p in sorted(parts.items()) for n in range(shape[0])]
    if sizes.experts in (None, shape[0]) and sizes.inner in (None, inner * world):
        return [{r: _expert(p, n) for r, p in parts.items()} for n in range(shape[0])]
    raise CannotDo(
        f"{name}: {list(shape)} on each of {world} ranks is not what {CONFIG} tells of"
        f" {sizes.experts or 'its'} experts of {sizes.inner or 'some'} inner size"
    )


def _expert(part: Local, number: int) -> Local:
    """One expert of a fused tensor."""
    box = Box.along(0, number, (1, *part.shape[1:]))
    at = narrowed(part.at, part.shape, box, part.dtype.itemsize, dropped=1)
    return Local(part.dtype, part.shape[1:], at)
