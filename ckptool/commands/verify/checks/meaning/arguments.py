"""Whether a model's description fits the tensors beside it: sizes, layers, experts, whole layers.

Descriptions are Megatron-LM's arguments, and a config.json of a known architecture.

Megatron builds the model of its arguments, and then fails to load tensors of other shapes. In
formats that it does not load, arguments are a record of where tensors came from, as in the file of
one rank, which has a part of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ckptool.commands.model.architectures import HEAD, Shapes, class_of, is_tied, shapes_of
from ckptool.commands.model.config import shared_names
from ckptool.commands.model.records import CONFIG, Record, arguments_in, read_beside
from ckptool.commands.open import Survey
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.text import list_some
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.companions import size_in

_LOADED = "megatron-"
"""How the names of Megatron's formats begin."""
_MODEL = r"(?:(?:model|module)\.)*"
_LAYERS = rf"{_MODEL}decoder\.layers\.(?:\d+\.)?"
_WORDS, _HEAD = rf"{_MODEL}embedding\.word_embeddings\.weight", rf"{_MODEL}output_layer\.weight"
_POSITIONS = rf"{_MODEL}embedding\.position_embeddings\.weight"
_NORM = rf"{_MODEL}decoder\.final_(?:layer)?norm\.weight"


class _Size(NamedTuple):
    """An argument, and the dim that it is the size of, from the last, of tensors of a name."""

    argument: str
    tensors: str
    dim: int


_SIZES = (
    _Size("padded_vocab_size", _WORDS, -2),
    _Size("hidden_size", f"{_WORDS}|{_HEAD}|{_POSITIONS}|{_NORM}", -1),
    _Size("max_position_embeddings", _POSITIONS, -2),
    _Size("num_experts", rf"{_LAYERS}mlp\.router\.weight", -2),
)
"""Megatron-core 0.12 to 0.20: ``language_model_embedding.py``, ``gpt_model.py``, ``router.py``. A
critic's head has one row, whatever the vocabulary."""
_OTHERWISE = (
    *("hybrid_layer_pattern", "hybrid_override_pattern", "decoder_num_layers"),
    "heterogeneous_layers_config_path",
)
"""Arguments of models that count layers in another way, or have some without tensors."""
_NUMBERED = re.compile(rf"{_MODEL}decoder\.layers\.([0-9]{{1,9}})\..+")
_STACKED = re.compile(rf"{_MODEL}decoder\.layers\.(?!\d).+")


def argument_problems(surveyed: Survey, catalog: Catalog) -> Iterator[Problem]:
    """Yield where arguments contradict the tensors, once for each argument."""
    arguments = arguments_in(catalog)
    if not arguments or not surveyed.format.name.startswith(_LOADED):
        return
    for argument, tensors, dim in _SIZES:
        size, pattern = size_in(arguments, argument), re.compile(tensors)
        entries = (e for name, e in catalog.tensors.items() if size and pattern.fullmatch(name))
        odd = (e for e in entries if len(e.shape) >= -dim and e.shape[dim] != size)
        for entry in list(odd)[:1]:
            message = f"args say {argument} {size:,}, but {entry.name} is {list(entry.shape)}"
            yield Problem(message, "config-mismatch", tensor=entry.name)
    yield from _check_layers(arguments, catalog)


def _check_layers(arguments: Record, catalog: Catalog) -> Iterator[Problem]:
    """Yield a problem if layers are more or fewer than the arguments say, or one is missing.

    The last layers may have been left out on purpose, to make a model smaller.
    """
    count = size_in(arguments, "num_layers")
    if count is None or any(arguments.get(name) for name in _OTHERWISE):
        return
    numbers = {int(m[1]) for m in map(_NUMBERED.fullmatch, catalog.tensors) if m}
    stacked = [e for name, e in catalog.tensors.items() if _is_stacked(name, e)]
    if numbers:
        missing = sorted(set(range(count)) - numbers)
        if len(numbers) != count or missing:
            which = f", without {missing[0]}" if missing else ""
            message = f"args say num_layers {count:,}, but there are {len(numbers):,} of"
            message += f" decoder.layers{which}"
            is_shorter = numbers == set(range(len(numbers))) and len(numbers) < count
            yield Problem(message, "layers-fewer" if is_shorter else "config-mismatch")
    for entry in [e for e in stacked if not numbers and e.shape[0] != count][:1]:
        message = f"args say num_layers {count:,}, but {entry.name} is {list(entry.shape)}"
        yield Problem(message, "config-mismatch", tensor=entry.name)


def _is_stacked(name: str, entry: TensorEntry) -> bool:
    return bool(_STACKED.fullmatch(name)) and len(entry.shape) > 1


_OF_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.(.+)")
_COMPUTED = "rotary_emb.inv_freq"
_EMBEDDING = "model.embed_tokens.weight"
_FEW = 4
_PART = 4
"""The share of a model, one in so many, of which more is not lost but left out."""


def lost_tensor_problems(surveyed: Survey, catalog: Catalog) -> Iterator[Problem]:
    """Yield a problem if a layer lacks a tensor that config.json's model and other layers have.

    The same goes for tensors before and after the layers, and for shapes unlike other layers'. With
    any tensor that this model does not have, it is another model, whatever its config says, and
    where much is missing, it was left out on purpose, as the head is of a model that embeds.
    """
    if surveyed.format.loading.config is None:
        return
    config: Record = {}
    with suppress(CkptoolError):  # said by the check of the config's sizes
        config = read_beside(surveyed.source, CONFIG)
    expected = shapes_of(config)
    if not expected:
        return
    tensors = {name for name in catalog.tensors if not name.endswith(_COMPUTED)}
    if not tensors or not tensors <= expected.keys():
        return
    missing = expected.keys() - tensors - catalog.conflicts.keys() - shared_names(catalog)
    places = [match for match in map(_OF_LAYER.fullmatch, expected) if match]
    layers = {match[1] for match in places if match[0] in tensors}
    having = Counter(match[2] for match in places if match[0] in tensors)
    lacking = Counter(match[2] for match in places if match[0] in missing)
    gaps = (match for match in places if match[0] in missing and match[1] in layers)
    names = [match[0] for match in gaps if lacking[match[2]] <= having[match[2]]]
    says = f"{CONFIG} says {class_of(config)}, but"
    for name, shape in _odd_shapes(places, expected, catalog):
        message = f"{says} {name} is {shape}, not {list(expected[name])} as in other layers"
        yield Problem(message, "config-mismatch", file=CONFIG, tensor=name)
    if 0 < _PART * len(names) <= len(tensors):
        message = f"{says} {list_some(names, _FEW)} not found, which other layers have"
        yield Problem(message, "config-mismatch", file=CONFIG)
    outside = missing - {HEAD} - ({_EMBEDDING} if HEAD in tensors and is_tied(config) else set())
    if outside and outside.isdisjoint(match[0] for match in places):
        message = f"{says} {list_some(sorted(outside), _FEW)} not found, and all layers are there"
        yield Problem(message, "config-mismatch", file=CONFIG)


def _odd_shapes(
    places: Sequence[re.Match[str]], expected: Shapes, catalog: Catalog
) -> Iterator[tuple[str, list[int]]]:
    """Yield the tensors, but empty ones, that lack the expected shape which other layers' have."""
    matches = [match for match in places if match[0] in catalog.tensors]
    shapes = {match[0]: catalog.tensors[match[0]].shape for match in matches}
    fitting = {match[2] for match in matches if shapes[match[0]] == expected[match[0]]}
    for name, _, kind in ((match[0], *match.groups()) for match in matches):
        if shapes[name] != expected[name] and kind in fitting and 0 not in shapes[name]:
            yield name, list(shapes[name])
