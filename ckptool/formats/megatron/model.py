"""The whole model: its training arguments, and the numbers of its layers and experts.

Megatron-LM's training puts its ``args`` namespace into every checkpoint. Every pipeline stage
counts its layers from zero, and every expert-parallel rank its experts. Stages have consecutive
layers; with a virtual pipeline each has several runs of layers (``model0``, ``model1``, ...), all
stages' first runs coming before their second ones (megatron-core,
``transformer/transformer_layer.py``, ``get_transformer_layer_offset``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.core.text import plural
from ckptool.serialization.pickle.records import Call

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_DEGREES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "DP": "data_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "CP": "context_parallel_size",
}
_ALWAYS = ("TP", "PP", "DP", "EP", "CP")
_SHOWN = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "query groups": "num_query_groups",
    "ffn": "ffn_hidden_size",
    "experts": "num_experts",
    "vocabulary": "padded_vocab_size",
    "sequence": "seq_length",
    "positions": "position_embedding_type",
}
_GATES = ("swiglu", "quick_geglu", "gated_linear_unit")
_LAYER = re.compile(r"((?:.*?\.)?layers\.)([0-9]{1,9})((?:\..*)?)")
_EXPERT = re.compile(r"(.*\blocal_experts\.)([0-9]{1,9})(\..*)")
_GROUPED = re.compile(r"(.*\bexperts\.linear_fc[12]\.(?:weight|bias))([0-9]{1,9})()")
EMBEDDING = "embedding.word_embeddings.weight"
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "global_tokens_per_expert", "inv_freq")

StageRun = tuple[int, int]
"""A pipeline stage, and one of its virtual stages."""


class Arguments(Struct, frozen=True):
    """The recorded arguments; ``values`` is empty if none were saved."""

    values: Mapping[str, Any]

    def integer(self, name: str) -> int | None:
        """Return a whole number greater than zero, or None if the arguments do not state one."""
        value = self.values.get(name)
        return value if type(value) is int and value > 0 else None

    def degree(self, short: str) -> int:
        """Return the degree of one kind of parallelism (``TP``, ``PP``, ...); 1 if not stated."""
        return self.integer(_DEGREES[short]) or 1

    @property
    def gated(self) -> bool | None:
        """Whether ``linear_fc1`` has a gate and an up projection; None if unknown."""
        values = [self.values[name] for name in _GATES if type(self.values.get(name)) is bool]
        return any(values) if values else None

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weights; only if that is recorded."""
        return not self.values.get("untie_embeddings_and_output_weights", True)

    @property
    def transformer(self) -> str | None:
        """``local`` or ``transformer_engine``: the origin of the model's layers."""
        value = self.values.get("transformer_impl")
        return value if isinstance(value, str) else None

    def info(self) -> dict[str, str]:
        """Return the framework, the degrees and the arguments for ``Catalog.info``."""
        if not self.values:
            return {"framework": "Megatron-core"}
        degrees = {short: self.integer(name) for short, name in _DEGREES.items()}
        notable = {k: n for k, n in degrees.items() if n and (n > 1 or k in _ALWAYS)}
        shown = [f"{k} {v}" for k, name in _SHOWN.items() if _is_shown(v := self.values.get(name))]
        shown += [k for k in (*_GATES, "bf16", "fp16") if self.values.get(k) is True]
        info = {
            "framework": "Megatron-core",
            "parallelism": ", ".join(f"{k} {n}" for k, n in notable.items()),
            "arguments": ", ".join(shown),
        }
        return {key: text for key, text in info.items() if text}


def _is_shown(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def read_arguments(value: Any) -> Arguments:
    """Return the arguments of a pickled namespace; none if the value is not a namespace."""
    if isinstance(value, Call) and value.name in _NAMESPACES:
        return Arguments({k: v for k, v in value.fields.items() if isinstance(k, str)})
    return Arguments(value if isinstance(value, dict) else {})


def find_arguments(objects: Iterable[ObjectEntry]) -> Arguments:
    """Return the arguments among a catalog's values: the one named ``args``."""
    return next(
        (read_arguments(entry.value) for entry in objects if entry.name == "args"), Arguments({})
    )


def keep_first_arguments(catalog: Catalog) -> Catalog:
    """Keep only the first rank's arguments: they differ just in the rank that saved them."""
    keys = [name for name in catalog.objects if name.startswith("args@rank")]
    if not keys:
        return catalog
    rest = {name: entry for name, entry in catalog.objects.items() if name not in keys}
    args = ObjectEntry("args", ("args",), catalog.objects[keys[0]].value)
    note = f"args: the first rank's are kept; those of {plural(len(keys) - 1, 'other rank')} differ"
    return replace(catalog, objects={"args": args} | rest, notes=(*catalog.notes, note))


# Names of layers and experts


def count_layers(names: Iterable[str]) -> dict[str, int]:
    """Return how many layers a run holds, by what precedes their number."""
    counts: dict[str, int] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def find_layer_offsets(runs: Mapping[StageRun, Sequence[str]]) -> dict[StageRun, dict[str, int]]:
    """Return for each run the numbers of its first layers in the whole model."""
    reached: dict[str, int] = {}
    offsets: dict[StageRun, dict[str, int]] = {}
    for stage, virtual in sorted(runs, key=lambda run: (run[1], run[0])):
        offsets[stage, virtual] = dict(reached)
        for prefix, count in count_layers(runs[stage, virtual]).items():
            reached[prefix] = reached.get(prefix, 0) + count
    return offsets


def number_layer(name: str, offsets: Mapping[str, int]) -> str:
    """Return the name with its layer's number in the whole model."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{int(match[2]) + offsets.get(match[1], 0)}{match[3]}"


def is_buffer(name: str) -> bool:
    """Return whether a module's tensor is not a parameter, and so irrelevant to the optimizer."""
    return name.endswith(_BUFFERS)


def is_expert(name: str) -> bool:
    """Return whether the parameter belongs to one of several experts."""
    return ".experts." in f".{name}"


def count_experts(names: Iterable[str]) -> int | None:
    """Return how many experts a rank numbers in its names; None if it numbers none."""
    numbers = [int(match[2]) for name in names if (match := _match_expert(name))]
    return max(numbers) + 1 if numbers else None


def number_expert(name: str, first: int) -> str:
    """Return the name with its expert's number in the whole model."""
    match = _match_expert(name)
    return name if match is None else f"{match[1]}{int(match[2]) + first}{match[3]}"


def _match_expert(name: str) -> re.Match[str] | None:
    return _EXPERT.fullmatch(name) or _GROUPED.fullmatch(name)
