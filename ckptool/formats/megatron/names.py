"""From the names that Megatron's ranks give to layers and experts to those of the whole model.

Every pipeline stage counts its layers from zero, and every expert-parallel rank its experts.
Stages hold consecutive layers; with a virtual pipeline each holds several runs of layers
(``model0``, ``model1``, ...), all stages' first runs coming before their second ones
(megatron-core, ``transformer/transformer_layer.py``, ``get_transformer_layer_offset``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_LAYER = re.compile(r"((?:.*?\.)?layers\.)([0-9]+)((?:\..*)?)")
_EXPERT = re.compile(r"(.*\blocal_experts\.)([0-9]+)(\..*)")
_GROUPED = re.compile(r"(.*\bexperts\.linear_fc[12]\.(?:weight|bias))([0-9]+)()")

_BUFFERS = ("expert_bias", "local_tokens_per_expert", "global_tokens_per_expert", "inv_freq")

Run = tuple[int, int]
"""A pipeline stage, and which of its virtual stages."""


def layer_counts(names: Iterable[str]) -> dict[str, int]:
    """Return how many layers a run holds, by what precedes their number."""
    counts: dict[str, int] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def layer_offsets(runs: Mapping[Run, Sequence[str]]) -> dict[Run, dict[str, int]]:
    """For each run, the number of its first layer in the whole model."""
    reached: dict[str, int] = {}
    offsets: dict[Run, dict[str, int]] = {}
    for stage, virtual in sorted(runs, key=lambda run: (run[1], run[0])):
        offsets[stage, virtual] = dict(reached)
        for prefix, count in layer_counts(runs[stage, virtual]).items():
            reached[prefix] = reached.get(prefix, 0) + count
    return offsets


def global_layer(name: str, offsets: Mapping[str, int]) -> str:
    """Return the name with its layer's number in the whole model."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{int(match[2]) + offsets.get(match[1], 0)}{match[3]}"


def is_buffer(name: str) -> bool:
    """Return whether a module's tensor is no parameter, and so of no concern to the optimizer."""
    return name.endswith(_BUFFERS)


def is_expert(name: str) -> bool:
    """Return whether the parameter belongs to one of several experts."""
    return ".experts." in f".{name}"


def local_experts(names: Iterable[str]) -> int | None:
    """Return how many experts a rank numbers in its names; None where it numbers none."""
    numbers = [int(match[2]) for name in names if (match := _expert(name))]
    return max(numbers) + 1 if numbers else None


def global_expert(name: str, first: int) -> str:
    """Return the name with its expert's number in the whole model."""
    match = _expert(name)
    return name if match is None else f"{match[1]}{int(match[2]) + first}{match[3]}"


def _expert(name: str) -> re.Match[str] | None:
    return _EXPERT.fullmatch(name) or _GROUPED.fullmatch(name)
