"""One tensor for each layer and expert, of tensors that stack them on leading dims."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.reshape import unstack
from ckptool.core.rewrite import renamed_path
from ckptool.errors import UsageError

_LAYERS = re.compile(r"((?:.*?\.)?layers\.)(?![0-9])(.+)")
_EXPERTS = re.compile(r"(.*\.experts\.)experts\.(?![0-9])((?!.*[0-9]$).+)")


def unstacked(catalog: Catalog) -> Catalog:
    """With ``layers.3.NAME`` for the slices of ``layers.NAME``, and likewise for experts.

    ``experts.experts.NAME`` becomes ``experts.local_experts.3.NAME``, as Megatron-core's modules
    call them. UsageError where no name stacks anything, or where a slice's name is taken.
    """
    tensors: dict[str, TensorEntry] = {}
    for entry in catalog.tensors.values():
        for part in _slices(entry):
            if part.name in tensors:
                raise UsageError(
                    f"--unstack: {entry.name} has a slice {part.name!r}, which is there"
                )
            tensors[part.name] = part
    if tensors.keys() == catalog.tensors.keys():
        raise UsageError("--unstack: no tensor here stacks layers or experts")
    return catalog.with_tensors(tensors)


def _slices(entry: TensorEntry) -> Iterator[TensorEntry]:
    layers = _LAYERS.fullmatch(entry.name)
    if layers and entry.shape:
        for number, part in enumerate(unstack(entry)):
            yield from _expert_slices(_renamed(part, f"{layers[1]}{number}.{layers[2]}"))
    else:
        yield from _expert_slices(entry)


def _expert_slices(entry: TensorEntry) -> Iterator[TensorEntry]:
    experts = _EXPERTS.fullmatch(entry.name)
    if not experts or not entry.shape:
        yield entry
        return
    for number, part in enumerate(unstack(entry)):
        yield _renamed(part, f"{experts[1]}local_experts.{number}.{experts[2]}")


def _renamed(entry: TensorEntry, name: str) -> TensorEntry:
    return replace(entry, name=name, path=renamed_path(entry.path, name))
