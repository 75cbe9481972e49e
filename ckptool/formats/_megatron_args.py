"""The ``args`` namespace that Megatron-LM's training puts into every checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.formats._pickle import Call

FRAMEWORK = "Megatron-core"
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


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the arguments say; ``values`` is empty where none were saved."""

    values: Mapping[str, Any]

    def integer(self, name: str) -> int | None:
        """A whole number greater than zero, or None where the arguments do not state one."""
        value = self.values.get(name)
        return value if type(value) is int and value > 0 else None

    def degree(self, short: str) -> int:
        """The degree of one kind of parallelism (``TP``, ``PP``, ...); 1 where it is not stated."""
        return self.integer(_DEGREES[short]) or 1

    @property
    def gated(self) -> bool | None:
        """Whether ``linear_fc1`` holds a gate and an up projection; None where nothing says."""
        stated = [self.values[name] for name in _GATES if type(self.values.get(name)) is bool]
        return any(stated) if stated else None

    @property
    def transformer(self) -> str | None:
        """``local`` or ``transformer_engine``: whose layers the model is made of."""
        value = self.values.get("transformer_impl")
        return value if isinstance(value, str) else None

    def info(self) -> dict[str, str]:
        """What ``Catalog.info`` says of the framework, the degrees and the arguments."""
        if not self.values:
            return {"framework": FRAMEWORK}
        degrees = {short: self.integer(name) for short, name in _DEGREES.items()}
        known = {k: n for k, n in degrees.items() if n and (n > 1 or k in _ALWAYS)}
        shown = [f"{k} {v}" for k, name in _SHOWN.items() if _is_shown(v := self.values.get(name))]
        shown += [k for k in (*_GATES, "bf16", "fp16") if self.values.get(k) is True]
        found = {
            "framework": FRAMEWORK,
            "parallelism": ", ".join(f"{k} {n}" for k, n in known.items()),
        }
        found["arguments"] = ", ".join(shown)
        return {key: text for key, text in found.items() if text}


def _is_shown(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def arguments(value: Any) -> Arguments:
    """The arguments of a pickled namespace; none where the value is no namespace."""
    if isinstance(value, Call) and value.name in _NAMESPACES:
        return Arguments({k: v for k, v in value.fields.items() if isinstance(k, str)})
    return Arguments(value if isinstance(value, dict) else {})


def arguments_among(objects: Iterable[ObjectEntry]) -> Arguments:
    """The arguments among a catalog's values: the one that is called ``args``."""
    return next(
        (arguments(entry.value) for entry in objects if entry.name == "args"), arguments(None)
    )


def with_first_arguments(catalog: Catalog) -> Catalog:
    """The first rank's arguments stand for all: they differ in the rank that saved them."""
    own = [name for name in catalog.objects if name.startswith("args@rank")]
    if not own:
        return catalog
    rest = {name: entry for name, entry in catalog.objects.items() if name not in own}
    args = ObjectEntry("args", ("args",), catalog.objects[own[0]].value)
    note = f"args: as the first rank saved them; {len(own) - 1} other ranks' differ"
    return replace(catalog, objects={"args": args} | rest, notes=(*catalog.notes, note))
