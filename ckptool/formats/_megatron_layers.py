"""The layers of a model, from the keys under which ``torch_dist`` stores their parameters.

Layers that are alike are stacked: ``decoder.layers.mlp.linear_fc1.weight`` is [layers, ...], its
experts ``mlp.experts.experts.linear_fc1.weight`` [layers, experts, ...]. Layers that differ have
numbers, ``decoder.layers.3.mlp.linear_fc1.weight``, and with ``singleton_local_shards`` (0.16) so
have all, and experts, ``mlp.experts.experts.5.linear_fc1.weight``; a gate and its up projection are
keys of their own then, ``linear_fc1.weight_w`` and ``_v`` (megatron-core 0.7 to 0.20).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckptool.core.catalog import TensorEntry
from ckptool.core.reshape import join
from ckptool.formats._megatron_names import is_buffer

_STACKED = re.compile(r"(.*\blayers\.)(?![0-9])(.+)")
_NUMBERED = re.compile(r"(.*?\blayers\.)([0-9]{1,7})\.(.+)")
_NUMBERED_EXPERT = re.compile(r"(.*\bmlp\.experts\.experts\.)([0-9]{1,7})\.(.+)")
_HALF = re.compile(r"(.*\blinear_fc1\.(?:weight|bias))_[wv]")


@dataclass(frozen=True, slots=True)
class LayerKey:
    """What a key says of its place: ``{prefix}{number}.{inner}``, and which expert's it is.

    ``stacked`` is how many leading dims of the tensor count layers.
    """

    prefix: str
    number: int
    inner: str
    expert: int | None
    stacked: int


@dataclass(slots=True)
class Layer:
    """One layer; ``keys`` are those it has in the checkpoint, by their inner name and expert."""

    prefix: str
    number: int
    stacked: int
    keys: dict[str, dict[int | None, str]] = field(default_factory=dict)


def stacked(key: str) -> tuple[str, str] | None:
    """What precedes and follows the layer's number, of a key that stacks layers; else None."""
    match = _STACKED.fullmatch(key)
    return (match[1], match[2]) if match else None


def layer_key(key: str, offset: tuple[int, ...] | None) -> LayerKey | None:
    """Where a key belongs, for the chunk at ``offset``; None for one outside of all layers."""
    numbered = _NUMBERED.fullmatch(key)
    if numbered:
        return LayerKey(numbered[1], int(numbered[2]), *_inner(numbered[3]), 0)
    both = stacked(key)
    return LayerKey(both[0], offset[0], *_inner(both[1]), 1) if both and offset else None


def _inner(name: str) -> tuple[str, int | None]:
    half = _HALF.fullmatch(name)
    name = half[1] if half else name
    expert = _NUMBERED_EXPERT.fullmatch(name)
    return (f"{expert[1]}{expert[3]}", int(expert[2])) if expert else (name, None)


def with_whole_gates(model: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, with those of which gate and up projection are two joined to one: [gate; up]."""
    found: dict[str, TensorEntry] = {}
    for name, entry in model.items():
        half = _HALF.fullmatch(name)
        other = model.get(f"{half[1]}_v") if half else None
        if half is None or other is None or other.shape != entry.shape:
            found[name] = entry
        elif name.endswith("_w"):
            found[half[1]] = replace(join([entry, other], 0), name=half[1])
    return found


def layers_among(
    entries: Iterable[TensorEntry], ranks: set[int]
) -> tuple[list[str], dict[tuple[str, int], Layer]]:
    """The keys outside of layers, and the layers, of which one of ``ranks`` wrote a chunk.

    A chunk of no known writer counts as the first rank's. Layers are in order of their numbers.
    """
    outer: dict[str, None] = {}
    layers: dict[tuple[str, int], Layer] = {}
    for entry in entries:
        for chunk in entry.chunks:
            if (chunk.rank or 0) not in ranks or is_buffer(entry.name):
                continue
            key = layer_key(entry.name, chunk.box.lo)
            if key is None:
                outer[entry.name] = None
                continue
            made = Layer(key.prefix, key.number, key.stacked)
            layer = layers.setdefault((key.prefix, key.number), made)
            layer.keys.setdefault(key.inner, {})[key.expert] = entry.name
    return list(outer), dict(sorted(layers.items()))
