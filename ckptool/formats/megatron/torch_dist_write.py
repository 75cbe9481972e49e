"""Lay out a ``torch_dist`` checkpoint that Megatron-core loads (0.12 to 0.16).

A run whose only checkpoint is a ``release``, which Megatron-LM starts from without the state of an
optimizer: a DCP folder of the model's tensors with ``metadata.json`` and ``common.pt``. Loading
asks for the extra state of every module (ShardedObjects, see ``arguments``), which is None
but for FP8.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.core.parts import part_of
from ckptool.errors import CannotDo
from ckptool.formats.base import Request
from ckptool.formats.companions import MEGATRON, RELEASE
from ckptool.formats.dcp import FORMAT as DCP
from ckptool.formats.megatron.arguments import COMMON
from ckptool.formats.megatron.torch_dist import CONFIG
from ckptool.formats.writing import companion_files, plain_objects
from ckptool.serialization.archive.write import torch_archive
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.state_dict.tree import nest

_ARGUMENTS = "args"
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COMMON = {"checkpoint_version": 3.0, "iteration": 0}
_NAMES = ("decoder.", "embedding.")
_WEIGHT = re.compile(r"(.+)\.weight[0-9]*(_[wv])?")
_STACKED = re.compile(r"layers\.(?![0-9])|experts\.experts\.(?![0-9])")


def _of_one_rank() -> Call:
    """The arguments that Megatron-LM compares with its own, as an ``argparse.Namespace``."""
    made = Call(Global("argparse", "Namespace"), ())
    made.state = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    return made


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """The files of a run with one ``release``. CannotDo where it is no model of Megatron's."""
    _require_model(catalog)
    arguments = catalog.objects.get(_ARGUMENTS)
    others = {n: e for n, e in catalog.objects.items() if e is not arguments}
    values, notes = plain_objects(replace(catalog, objects=others))
    states = {state.name: state for e in catalog.tensors.values() for state in _states(e)}
    inner = DCP.lay_out(replace(catalog, objects=states, companions={}), request)
    common = nest([(entry.path, entry.value) for entry in values]) if values else {}
    common = {_ARGUMENTS: arguments.value if arguments else _of_one_rank(), **_COMMON, **common}
    files = (
        *map(_within, inner.files),
        FileLayout(f"{RELEASE}/{COMMON}", tuple(torch_archive(common, root="common"))),
        FileLayout(f"{RELEASE}/{CONFIG}", (Literal(json.dumps(_BACKENDS).encode()),)),
        FileLayout(MEGATRON, (Literal(RELEASE.encode()),)),
    )
    return Layout((*companion_files(catalog), *files), folder=True, notes=(*inner.notes, *notes))


def _within(file: FileLayout) -> FileLayout:
    path = f"{RELEASE}/{file.path}"
    return FileLayout.lazy(path, file.nbytes, lambda: file.parts, file.rank)


def _require_model(catalog: Catalog) -> None:
    if not any(name.startswith(_NAMES) for name in catalog.tensors):
        raise CannotDo(
            "no tensor has a name of Megatron-core's GPT, such as embedding.word_embeddings.weight",
            hint="--map megatron-gpt, or another that `ckptool maps` lists, gives it; --model-only",
        )
    odd = [n for n, e in catalog.tensors.items() if part_of(e) != "model"]
    if odd:
        raise CannotDo(
            f"a release of Megatron-LM's holds the model alone, and {odd[0]} is none of it",
            hint="--model-only leaves out what is not the model's",
        )


def _states(entry: TensorEntry) -> Iterator[ObjectEntry]:
    """The extra states of a weight's module, and of the attention that its projection follows."""
    match = _WEIGHT.fullmatch(entry.name)
    if match is None:
        return
    stacked = len(_STACKED.findall(entry.name))
    sizes = entry.shape[:stacked] or (1,)
    modules = [match[1]]
    if match[1].endswith("self_attention.linear_proj"):
        modules.append(match[1].replace("linear_proj", "core_attention"))
    for module, *index in itertools.product(modules, *map(range, sizes)):
        name = f"{module}._extra_state/shard_{_joined(index)}_{_joined(sizes)}"
        yield ObjectEntry(name, (name,), [None])


def _joined(numbers: Sequence[object]) -> str:
    return ".".join(map(str, numbers))
