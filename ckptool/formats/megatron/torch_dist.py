"""Megatron-core's ``torch_dist``: a DCP folder read, and laid out as Megatron-core loads it.

Up to 0.15 tensors are stored reformulated where ranks held flat ranges: a tensor ``[X, Y]`` whose
ranks hold ``[x, y]`` as ``[X/x, Y/y, x*y]``, whose last dim the data-parallel ranks cut anywhere
(``sharded_tensor_to_torch_sharded_tensor``). The ``mcore_data`` of ``.metadata`` keeps ``[X, Y]``.

A ShardedObject is a bytes item ``{key}/shard_{offsets}_{shape}`` that holds a list of one value
(0.12 to 0.20; before, the last size may be missing). The common state is ``common.pt`` up to 0.16
and the ShardedObject ``common_state`` from 0.20 on.

Written (Megatron-core 0.12 to 0.16) is a run whose only checkpoint is a ``release``, which
Megatron-LM starts from without the state of an optimizer: a DCP folder of the model's tensors with
``metadata.json`` and ``common.pt``. Loading asks for the extra state of every module, a
ShardedObject, which is None but for FP8.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, TensorEntry, flat_name
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.core.state_category import state_category
from ckptool.core.views import merge_dims, permute, split_dim
from ckptool.errors import Damaged, Problem, Unrecognized, Unsupported, damaged
from ckptool.formats.base import Request, ScanOptions
from ckptool.formats.companions import MEGATRON, RELEASE
from ckptool.formats.dcp import FORMAT as DCP
from ckptool.formats.dcp import DcpMetadata, read_folder
from ckptool.formats.megatron import COMMON, CONFIG
from ckptool.formats.megatron.model import find_arguments
from ckptool.formats.megatron.optimizer.torch_dist import name_state
from ckptool.formats.writing import lay_out_companions, select_plain
from ckptool.serialization.archive.write import archive_file
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import read_file_leaves
from ckptool.serialization.state_dict.tree import StateDictWalk, assign_names, nest

FORMAT_NAME = "megatron-torch_dist"
_COMMON_STATE = "common_state"
_SHARD = re.compile(r"(.+)/shard_([0-9]+(?:\.[0-9]+)*)(?:_([0-9.]{0,999}))?")
_ARGUMENTS = "args"
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COMMON_VALUES = {"checkpoint_version": 3.0, "iteration": 0}
_NAMES = ("decoder.", "embedding.")
_WEIGHT = re.compile(r"(.+)\.weight[0-9]*(_[wv])?")
_STACKED = re.compile(r"layers\.(?![0-9])|experts\.experts\.(?![0-9])")


def scan(source: Source, config: dict[str, Any] | None, options: ScanOptions) -> Catalog:
    """Return the catalog of a ``torch_dist`` folder; ``config`` is its ``metadata.json``."""
    backend = (config or {}).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise Unrecognized(
            f"{source.root}: a Megatron-core checkpoint of the backend {str(backend)[:80]!r};"
            " ckptool reads torch_dist",
            hint="Megatron-core up to 0.13 loads it and saves it with --ckpt-format torch_dist",
        )
    catalog, parsed = read_folder(source, options)
    _require_common(source, catalog, options)
    catalog = _add_common(source, _unwrap_objects(_reshape(catalog, parsed)))
    plans = [plan for metadata in parsed.values() for plan in metadata.plans or ()]
    catalog = _describe(source, name_state(source, catalog, plans))
    return options.with_placements(
        catalog if config is not None else _note_unfinished(source, catalog, options)
    )


def _reshape(catalog: Catalog, parsed: dict[str, DcpMetadata]) -> Catalog:
    """Restore the shapes that tensors had before they were reformulated."""
    tensors = dict(catalog.tensors)
    for name, shape in chain(*(metadata.reformulated.items() for metadata in parsed.values())):
        if name not in tensors:
            raise Damaged(
                f"{name}: mcore_data gives it the shape {list(shape)}, but no file stores it",
                "data-missing",
            )
        tensors[name] = _unflatten(tensors[name], shape)
    return catalog.with_tensors(tensors)


def _describe(source: Source, catalog: Catalog) -> Catalog:
    info = catalog.info | {"writer": "Megatron-core torch_dist"}
    info |= find_arguments(catalog.objects.values()).info()
    files = catalog.files | {n: source.files[n] for n in (CONFIG,) if n in source.files}
    return replace(catalog, format=FORMAT_NAME, info=info, files=files)


def _note_unfinished(source: Source, catalog: Catalog, options: ScanOptions) -> Catalog:
    """Note that a save's last file is missing, though all else can be read: damage to verify."""
    if CONFIG in source.files:
        message = f"{CONFIG} names no backend, as Megatron's does: it is damaged"
        raise Damaged(message, "metadata-unreadable", file=CONFIG)
    message = f"{CONFIG} is missing: Megatron writes it last, so the save never finished"
    if options.problems is not None:
        options.report([Problem(message, "save-incomplete", file=CONFIG)], subject=source.root)
    return replace(catalog, notes=(*catalog.notes, message))


def _unflatten(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Return the tensor in its own ``shape``; Damaged if it is not stored reformulated."""
    grid = entry.shape[:-1]
    local = tuple(size // parts for size, parts in zip(shape, grid, strict=False))
    whole = tuple(size * parts for size, parts in zip(local, grid, strict=False))
    if len(grid) != len(shape) or whole != shape or math.prod(local) != entry.shape[-1]:
        raise Damaged(
            f"{entry.name}: stored as {list(entry.shape)}, which is not a reshape of the"
            f" {list(shape)} that mcore_data states",
            "tensor-record",
        )
    dims = len(shape)
    order = [dim + of_local for dim in range(dims) for of_local in (0, dims)]
    entry = permute(split_dim(entry, dims, local), order)
    for dim in range(dims):
        entry = merge_dims(entry, dim, 2)
    return entry


# Common state and ShardedObjects


def _unwrap_objects(catalog: Catalog) -> Catalog:
    """Unwrap ShardedObjects and name them ``key``, or ``key.offset.offset``."""
    paths = [(tensor, _simplify_path(tensor.path)) for tensor in catalog.tensors.values()]
    entries = [replace(tensor, name=flat_name(path), path=path) for tensor, path in paths]
    values = [value for entry in catalog.objects.values() for value in _unwrap(entry)]
    counts = Counter([*(entry.name for entry in entries), *(value.name for value in values)])
    for name, count in counts.most_common(1):
        if count > 1:
            message = f"{name}: two ShardedObjects, or one and a tensor, have this key and offset"
            raise Damaged(message, "items-overlap", tensor=name)
    tensors = {entry.name: entry for entry in entries}
    return replace(catalog, tensors=tensors, objects={value.name: value for value in values})


def _simplify_path(path: Path) -> Path:
    """Return a path without the shard's grid, and without the list of one around the value."""
    match = _SHARD.fullmatch(str(path[0]))
    if match is None:
        return path
    inner = path[2:] if len(path) > 1 and isinstance(path[1], Index) else path[1:]
    if match[1] == _COMMON_STATE:
        return inner
    sizes = [int(size) for size in (match[3] or "").split(".") if size]
    is_whole = all(size == 1 for size in sizes)
    return (match[1] if is_whole else f"{match[1]}.{match[2]}", *inner)


def _unwrap(entry: ObjectEntry) -> list[ObjectEntry]:
    path = _simplify_path(entry.path)
    value = entry.value
    if len(entry.path) == 1 and _SHARD.fullmatch(str(entry.path[0])):
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if path:
        return [ObjectEntry(flat_name(path), path, value)]
    leaves = assign_names(StateDictWalk(entry.name, 1 << 20).leaves(value))
    return [ObjectEntry(name, path, leaf) for name, (path, leaf) in leaves.items()]


def _require_common(source: Source, catalog: Catalog, options: ScanOptions) -> None:
    """Report common state that is missing in a catalog with names as stored: every save has it."""
    paths = [entry.path for entry in catalog.objects.values()]
    paths += [entry.path for entry in catalog.tensors.values()]
    paths += [(name,) for name in catalog.conflicts]
    prefix = f"{_COMMON_STATE}/"
    if COMMON in source.files or any(str(path[0]).startswith(prefix) for path in paths):
        return
    message = f"{COMMON} is missing: Megatron keeps arguments, step and optimizer groups there"
    options.report(
        [Problem(message, "file-missing", file=COMMON)],
        subject=source.root,
        hint="ckptool verify --salvage writes the tensors, which other files hold",
    )


def _add_common(source: Source, catalog: Catalog) -> Catalog:
    """Return the catalog with the values and tensors of ``common.pt``."""
    if COMMON not in source.files:
        return catalog
    common = assemble({0: read_file_leaves(source, COMMON)})
    if common.problems:
        raise damaged(common.problems, subject=COMMON)
    twice = {*common.objects, *common.tensors} & {*catalog.objects, *catalog.tensors}
    if twice:
        message = f"{COMMON}: {min(twice)!r} is also in the files beside it"
        raise Damaged(message, "items-overlap", file=COMMON, tensor=min(twice))
    return common.added_to(catalog, source, COMMON)


# Writing


def _make_arguments() -> Call:
    """Return the arguments that Megatron-LM compares with its own, as an ``argparse.Namespace``."""
    namespace = Call(Global("argparse", "Namespace"), ())
    namespace.state = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    return namespace


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Return the files of a run with one ``release``; Unsupported for another model's tensors."""
    _require_model(catalog)
    arguments = catalog.objects.get(_ARGUMENTS)
    objects = {n: e for n, e in catalog.objects.items() if e is not arguments}
    values, notes = select_plain(replace(catalog, objects=objects))
    states = {
        state.name: state for e in catalog.tensors.values() for state in _list_extra_states(e)
    }
    inner = DCP.lay_out(replace(catalog, objects=states, companions={}), request)
    common = nest([(entry.path, entry.value) for entry in values]) if values else {}
    args = arguments.value if arguments else _make_arguments()
    common = {_ARGUMENTS: args, **_COMMON_VALUES, **common}
    files = (
        *(file.within(RELEASE) for file in inner.files),
        archive_file(f"{RELEASE}/{COMMON}", common),
        FileLayout(f"{RELEASE}/{CONFIG}", (Literal(json.dumps(_BACKENDS).encode()),)),
        FileLayout(MEGATRON, (Literal(RELEASE.encode()),)),
    )
    return Layout((*lay_out_companions(catalog), *files), folder=True, notes=(*inner.notes, *notes))


def _require_model(catalog: Catalog) -> None:
    if not any(name.startswith(_NAMES) for name in catalog.tensors):
        raise Unsupported(
            "no tensor has a name of Megatron-core's GPT, such as embedding.word_embeddings.weight",
            hint="add --model-only and a key map, such as --map megatron-gpt (see `ckptool maps`)",
        )
    names = [n for n, e in catalog.tensors.items() if state_category(e) != "model"]
    if names:
        raise Unsupported(
            f"a Megatron-LM release holds only the model, and {names[0]} is not part of it",
            hint="--model-only excludes all that is not the model's",
        )


def _list_extra_states(entry: TensorEntry) -> Iterator[ObjectEntry]:
    """Yield the extra states of a weight's module, and of the attention before its projection."""
    match = _WEIGHT.fullmatch(entry.name)
    if match is None:
        return
    stacked = len(_STACKED.findall(entry.name))
    sizes = entry.shape[:stacked] or (1,)
    modules = [match[1]]
    if match[1].endswith("self_attention.linear_proj"):
        modules.append(match[1].replace("linear_proj", "core_attention"))
    for module, *index in itertools.product(modules, *map(range, sizes)):
        name = f"{module}._extra_state/shard_{_join(index)}_{_join(sizes)}"
        yield ObjectEntry(name, (name,), [None])


def _join(numbers: Sequence[object]) -> str:
    return ".".join(map(str, numbers))
