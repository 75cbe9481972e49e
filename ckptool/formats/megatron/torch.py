"""From the folders of model-parallel ranks to the tensors of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.catalog import Catalog, Path, flat_name
from ckptool.core.sharding.tensor_parallel import NamedRule, require_matched
from ckptool.errors import Refusal, Undetermined, damaged
from ckptool.formats.base import ScanOptions
from ckptool.formats.megatron.arguments import Arguments, with_first_arguments
from ckptool.formats.megatron.names import (
    global_expert,
    global_layer,
    is_buffer,
    layer_offsets,
    local_experts,
)
from ckptool.formats.megatron.optimizer.gathered import (
    expected_buffers,
    gathered_state,
    matched_buffers,
    saved_buffers,
    stray_keys,
)
from ckptool.formats.megatron.optimizer.numbered import numbered_state
from ckptool.formats.megatron.parameters import (
    Fragments,
    LocalParameter,
    Model,
    StorageRun,
    merge_fragments,
)
from ckptool.formats.megatron.rank_folders import (
    RankFolder,
    degrees,
    layer_wise_conflict,
    read_folders,
    virtual_stage,
)
from ckptool.formats.megatron.tensor_parallel import experts_view
from ckptool.serialization.archive.tensors import place_of
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf
from ckptool.serialization.state_dict.values import stray_notes, unread_notes

FORMAT_NAME = "megatron-torch"
_RANDOM = "rng_state"
_STATE = "optimizer.state"
_HEADS = ("output_layer.weight", "word_embeddings_for_head.weight")


@dataclass(slots=True)
class _Read:
    """What the ranks hold together, as far as it is read."""

    model: Model
    offsets: dict[tuple[int, int], dict[str, int]]
    tied: dict[str, str]
    found: Fragments = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    held: dict[int, list[list[LocalParameter]]] = field(default_factory=dict)

    def add(self, more: Fragments) -> None:
        for path, parts in more.items():
            self.found.setdefault(path, []).extend(parts)


def scan(source: Source, options: ScanOptions) -> Catalog:
    """Return the catalog of Megatron's own format.

    Raises Damaged where ranks are missing or contradict.
    """
    folders, args = read_folders(source)
    read = _prepared(folders, args, options.tp_rules)
    for folder in folders:
        _read_model(folder, read)
    if any(_is_refused(folder) for folder in folders):
        read.conflicts[_STATE] = (
            f"{_STATE}: not placed, as some of the optimizer or its model cannot be read"
        )
    else:
        for folder in folders:
            _read_optimizer(source, folder, read)
    require_matched(options.tp_rules, [path[-1] for path in read.found])
    others = assemble(_others(folders, read))
    whole = merge_fragments(read.model.fit, _without_refused(read.found, others.conflicts))
    refusals = {n: why for n, why in others.conflicts.items() if isinstance(why, Refusal)}
    problems = [why for name, why in others.conflicts.items() if name not in refusals]
    if others.problems or problems:
        raise damaged([*others.problems, *problems], subject=source.root)
    opened = [file for folder in folders for file in (folder.file, folder.distributed) if file]
    names = [file.what for file in opened]
    catalog = Catalog(
        FORMAT_NAME,
        whole.tensors | others.tensors,
        others.objects,
        {name: source.files[name] for name in names},
        world_size=args.integer("world_size") or len(folders),
        info={"writer": "Megatron-LM, one folder per model-parallel rank"} | args.info(),
        notes=(*others.notes, *read.notes, *unread_notes(others.objects)),
        conflicts=refusals | read.conflicts | whole.conflicts | layer_wise_conflict(source),
    )
    return with_first_arguments(catalog)


def _without_refused(found: Fragments, conflicts: Mapping[str, str]) -> Fragments:
    """Return what no rank refuses; what only some refuse is a tensor, as the others show."""
    for path in found:
        why = conflicts.get(flat_name(path))
        if isinstance(why, Refusal):
            why.may_be_tensor = True
    return {path: parts for path, parts in found.items() if flat_name(path) not in conflicts}


def _prepared(folders: list[RankFolder], args: Arguments, rules: tuple[NamedRule, ...]) -> _Read:
    """Return the model's degrees, layer numbers, and names of tied parameters."""
    runs = {
        (folder.rank[1], virtual): list(params)
        for folder in folders
        for virtual, params in folder.runs.items()
    }
    sizes = degrees([folder.rank for folder in folders])
    names = {name for run in runs.values() for name in run}
    names |= {name for folder in folders for name in _refused_names(folder)}
    word = next((n for n in names if n.endswith("embedding.word_embeddings.weight")), None)
    tied = (
        {}
        if args.values.get("untie_embeddings_and_output_weights", True)
        else dict.fromkeys((name for name in names if name.endswith(_HEADS)), word or "")
    )
    return _Read(Model(args, sizes, rules), layer_offsets(runs), tied if word else {})


def _read_model(folder: RankFolder, read: _Read) -> None:
    """Add a rank's model; of a parameter with two names, the optimizer knows the first alone."""
    experts = local_experts(name for run in folder.runs.values() for name in run)
    stacked = read.model.args.integer("num_experts")
    if experts is None and stacked is not None:
        experts = stacked // read.model.degrees[2]
    places = set()
    for virtual, run in sorted(folder.runs.items()):
        held = []
        for name, leaf in run.items():
            one = _local_parameter(
                _global(name, folder, virtual, read, experts), folder, leaf, experts
            )
            read.model.shapes.setdefault(one.name, one.local)
            tensor = leaf.tensor
            stored = StorageRun(tensor.shape, tensor.dtype, leaf.place)
            read.add({("model", one.name): [(one, [stored])]})
            if not is_buffer(name) and leaf.place not in places:
                held.append(one)
            places.add(leaf.place)
        read.held.setdefault(folder.number, []).append(held)


def _global(name: str, folder: RankFolder, virtual: int, read: _Read, experts: int | None) -> str:
    """Return the name in the whole model; that of the embedding for a head that is tied to it."""
    layered = global_layer(name, read.offsets[folder.rank[1], virtual])
    return read.tied.get(name) or global_expert(layered, folder.rank[2] * (experts or 0))


def _local_parameter(
    name: str, folder: RankFolder, leaf: PlainLeaf, experts: int | None
) -> LocalParameter:
    tensor = leaf.tensor
    local = experts_view(name, tensor.shape, experts) if experts else tensor.shape
    view = None if tensor.fills_storage else (tensor.storage.key, tensor.offset)
    return LocalParameter(
        name, folder.rank, folder.number, local, tensor.dtype, view, local != tensor.shape
    )


def _read_optimizer(source: Source, folder: RankFolder, read: _Read) -> None:
    """The rank's optimizer state by name, or a conflict where nothing names it."""
    runs = read.held[folder.number]
    expert_parallel = read.model.degrees[2] > 1
    value = folder.values("optimizer")
    try:
        if folder.distributed is not None:
            file = folder.distributed
            read.notes += stray_notes(file.what, stray_keys(file.value))
            saved = saved_buffers(file.value, lambda tensor: place_of(tensor, file))
            expected = expected_buffers(runs, expert_parallel)
            buffers = matched_buffers(saved, expected)
            read.add(gathered_state(source, buffers, bool(read.tied)))
        elif _has_state(value):
            held = [one for run in runs for one in run]
            found, stated = numbered_state(folder.file, value, held, expert_parallel)
            read.add(found)
            read.model.stated |= stated
    except Undetermined as error:
        read.conflicts[_STATE] = (
            f"{_STATE}: which parameters the optimizer's state belongs to is not known: {error}"
            f" ({(folder.distributed or folder.file).what})"
        )


def _is_refused(folder: RankFolder) -> bool:
    """Return whether a part of a rank's optimizer cannot be read, so that none of it is placed.

    The optimizer lists the parameters in the order of the model, of which a part may be refused.
    """
    leaves = folder.rest.values()
    refused = [leaf for leaf in leaves if isinstance(leaf.value, Refusal)]
    return any(leaf.path[0] == "optimizer" for leaf in refused) or any(_refused_names(folder))


def _refused_names(folder: RankFolder) -> Iterator[str]:
    """Yield the names, on the rank, of what is refused of its model."""
    for leaf in folder.rest.values():
        is_model = len(leaf.path) > 1 and virtual_stage(str(leaf.path[0])) is not None
        if is_model and isinstance(leaf.value, Refusal):
            yield flat_name(leaf.path[1:])


def _has_state(value: Any) -> bool:
    """Return whether any of the optimizers holds states by number (else they are distributed)."""
    optimizers = value if isinstance(value, list) else [value]
    inner = [one.get("optimizer", one) for one in optimizers if isinstance(one, dict)]
    return any(isinstance(one, dict) and one.get("state") for one in inner)


def _others(folders: list[RankFolder], read: _Read) -> dict[int, dict[str, Leaf]]:
    """Return each rank's other values, with the layers of the whole model.

    Those of a rank as such.
    """
    found: dict[int, dict[str, Leaf]] = {}
    for folder in folders:
        experts = local_experts(name for run in folder.runs.values() for name in run)
        mine = found.setdefault(folder.number, {})
        for leaf in folder.rest.values():
            path = _of_whole(leaf.path, folder, read, experts)
            rank_state = isinstance(leaf.value, PlainLeaf)
            value = leaf.value
            if isinstance(value, Refusal):
                value = value.called(flat_name(path))
            mine[flat_name(path)] = Leaf(path, value, rank_state)
    return found


def _of_whole(path: Path, folder: RankFolder, read: _Read, experts: int | None) -> Path:
    """Return the path of a value in the whole model; random states by pipeline and tensor rank."""
    first = str(path[0])
    if first == _RANDOM:
        tensor, pipeline, expert = folder.rank
        numbers = (pipeline, tensor, expert) if read.model.degrees[2] > 1 else (pipeline, tensor)
        return (_RANDOM, *map(str, numbers), *path[1:])
    virtual = virtual_stage(first) if len(path) > 1 else None
    if virtual is None or (folder.rank[1], virtual) not in read.offsets:
        return path
    return ("model", _global(flat_name(path[1:]), folder, virtual, read, experts))
