"""The ``args`` namespace that Megatron-LM's training puts into every checkpoint.

Megatron-core's ShardedObjects and common state, under the names a person knows them by.

A ShardedObject is a bytes item ``{key}/shard_{offsets}_{shape}`` that holds a list of one value
(megatron-core 0.12 to 0.20; before, the last size may be missing). The common state is
``common.pt`` up to 0.16 and the ShardedObject ``common_state`` from 0.20 on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, TensorEntry, flat_name
from ckptool.errors import Damaged, Problem, damaged
from ckptool.formats.base import ScanOptions
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import read_leaves
from ckptool.serialization.state_dict.tree import leaves, unique_names

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
        """Return a whole number greater than zero, or None where the arguments do not state one."""
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
        """Return what ``Catalog.info`` says of the framework, the degrees and the arguments."""
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
    """Return the arguments of a pickled namespace; none where the value is no namespace."""
    if isinstance(value, Call) and value.name in _NAMESPACES:
        return Arguments({k: v for k, v in value.fields.items() if isinstance(k, str)})
    return Arguments(value if isinstance(value, dict) else {})


def arguments_among(objects: Iterable[ObjectEntry]) -> Arguments:
    """Return the arguments among a catalog's values: the one that is called ``args``."""
    return next(
        (arguments(entry.value) for entry in objects if entry.name == "args"), arguments(None)
    )


def with_first_arguments(catalog: Catalog) -> Catalog:
    """Return the first rank's arguments stand for all: they differ in the rank that saved them."""
    own = [name for name in catalog.objects if name.startswith("args@rank")]
    if not own:
        return catalog
    rest = {name: entry for name, entry in catalog.objects.items() if name not in own}
    args = ObjectEntry("args", ("args",), catalog.objects[own[0]].value)
    note = f"args: as the first rank saved them; {len(own) - 1} other ranks' differ"
    return replace(catalog, objects={"args": args} | rest, notes=(*catalog.notes, note))


COMMON = "common.pt"
_SHARD = re.compile(r"(.+)/shard_([0-9]+(?:\.[0-9]+)*)(?:_([0-9.]*))?")
_STATE = "common_state"


def with_plain_names(catalog: Catalog) -> Catalog:
    """The catalog with ShardedObjects unwrapped and named ``key``, or ``key.offset.offset``."""
    tensors, objects = {}, {}
    for tensor in catalog.tensors.values():
        path = _plain(tensor.path)
        tensors[flat_name(path)] = replace(tensor, name=flat_name(path), path=path)
    for entry in catalog.objects.values():
        for found in _unwrapped(entry):
            objects[found.name] = found
    if len(tensors) < len(catalog.tensors) or tensors.keys() & objects.keys():
        raise Damaged(
            "two ShardedObjects, or one and a tensor, have the same key and offset", "items-overlap"
        )
    return replace(catalog, tensors=tensors, objects=objects)


def _plain(path: Path) -> Path:
    """Return a path without the shard's grid, and without the list of one around the value."""
    match = _SHARD.fullmatch(str(path[0]))
    if match is None:
        return path
    inner = path[2:] if len(path) > 1 and isinstance(path[1], Index) else path[1:]
    if match[1] == _STATE:
        return inner
    sizes = [int(size) for size in (match[3] or "").split(".") if size]
    whole = all(size == 1 for size in sizes)
    return (match[1] if whole else f"{match[1]}.{match[2]}", *inner)


def _unwrapped(entry: ObjectEntry) -> list[ObjectEntry]:
    path = _plain(entry.path)
    value = entry.value
    if len(entry.path) == 1 and _SHARD.fullmatch(str(entry.path[0])):
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if path:
        return [ObjectEntry(flat_name(path), path, value)]
    named = unique_names(leaves(value, what=entry.name, pickled=1 << 20))
    return [ObjectEntry(name, path, leaf) for name, (path, leaf) in named.items()]


def require_common(source: Source, catalog: Catalog, options: ScanOptions) -> None:
    """Report common state that is nowhere: every save has it, as a file or as a ShardedObject.

    ``catalog`` still has the names of the checkpoint.
    """
    paths = [entry.path for entry in catalog.objects.values()]
    paths += [entry.path for entry in catalog.tensors.values()]
    paths += [(name,) for name in catalog.conflicts]
    if COMMON in source.files or any(str(path[0]).startswith(f"{_STATE}/") for path in paths):
        return
    message = (
        f"{COMMON} is missing, where Megatron keeps arguments, step and the optimizer's groups"
    )
    options.report(
        [Problem(message, "file-missing", file=COMMON)],
        subject=source.root,
        hint="verify --salvage writes the tensors, which are elsewhere",
    )


def with_common(source: Source, catalog: Catalog) -> Catalog:
    """Return the catalog with the values and tensors of ``common.pt``."""
    if COMMON not in source.files:
        return catalog
    found = assemble({0: read_leaves(read_torch_file(source, COMMON), source, refuse=True)})
    if found.problems:
        raise damaged(found.problems, subject=COMMON)
    twice = found.objects.keys() & catalog.objects.keys()
    if twice:
        raise Damaged(f"{COMMON}: {sorted(twice)[0]!r} is also a ShardedObject", "items-overlap")
    tensors: dict[str, TensorEntry] = catalog.tensors | found.tensors
    files = catalog.files | {COMMON: source.files[COMMON]}
    return replace(
        catalog,
        tensors=tensors,
        objects=catalog.objects | found.objects,
        conflicts=catalog.conflicts | found.conflicts,
        files=files,
    )
