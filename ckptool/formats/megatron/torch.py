"""Read Megatron's own format: from ranks' folders to the tensors of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from ckptool.core.catalog import Catalog, Path, flat_name
from ckptool.core.sharding.tensor_parallel import given_rules
from ckptool.core.views import whole_tensor
from ckptool.errors import Refusal, Undetermined, damaged
from ckptool.formats.base import ScanOptions
from ckptool.formats.megatron.model import (
    EMBEDDING,
    Arguments,
    find_layer_offsets,
    is_buffer,
    keep_first_arguments,
    number_expert,
    number_layer,
)
from ckptool.formats.megatron.optimizer.buckets import group_parameters
from ckptool.formats.megatron.optimizer.torch import (
    find_stray_keys,
    match_buffers,
    read_buffers,
    read_gathered,
    read_numbered,
)
from ckptool.formats.megatron.rank_folders import (
    RankFolder,
    count_degrees,
    find_layer_wise_conflict,
    find_virtual_stage,
    read_folders,
)
from ckptool.formats.megatron.tensor_parallel import (
    Fragments,
    LocalParameter,
    ParameterRules,
    add_fragments,
    merge_fragments,
    view_experts,
)
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf
from ckptool.serialization.state_dict.values import note_stray_keys

FORMAT_NAME = "megatron-torch"
_RANDOM = "rng_state"
_STATE = "optimizer.state"
_HEADS = ("output_layer.weight", "word_embeddings_for_head.weight")


class _ModelRanks(Struct):
    """The joint content of the ranks, so far.

    ``offsets`` are the first layers of each stage's runs, ``tied`` parameters' first names,
    ``parameters`` those of each rank's runs, by the rank's number.
    """

    rules: ParameterRules
    offsets: dict[tuple[int, int], dict[str, int]]
    tied: dict[str, str]
    fragments: Fragments = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parameters: dict[int, list[list[LocalParameter]]] = field(default_factory=dict)


def scan(source: Source, options: ScanOptions) -> Catalog:
    """Return the catalog of Megatron's own format; Damaged if ranks are missing or disagree."""
    folders, args = read_folders(source)
    ranks = _prepare(folders, args)
    for folder in folders:
        _read_model(folder, ranks)
    if any(_is_refused(folder) for folder in folders):
        ranks.conflicts[_STATE] = (
            f"{_STATE}: not read: part of the optimizer or its model cannot be read"
        )
    else:
        for folder in folders:
            _read_optimizer(source, folder, ranks)
    ranks.rules.user_rules = given_rules(options.tp_rules, {path[-1] for path in ranks.fragments})
    assembled = assemble(_collect_others(folders, ranks))
    fragments = _drop_refused(ranks.fragments, assembled.conflicts)
    tensors, conflicts = merge_fragments(ranks.rules.fit, fragments)
    refusals = {n: why for n, why in assembled.conflicts.items() if isinstance(why, Refusal)}
    problems = [why for name, why in assembled.conflicts.items() if name not in refusals]
    if assembled.problems or problems:
        raise damaged([*assembled.problems, *problems], subject=source.root)
    opened = [file.what for folder in folders for file in (folder.file, folder.distributed) if file]
    assembled.tensors = tensors | assembled.tensors
    assembled.notes += ranks.notes
    assembled.conflicts = refusals | ranks.conflicts | conflicts | find_layer_wise_conflict(source)
    catalog = assembled.catalog(
        FORMAT_NAME,
        source,
        opened,
        world_size=args.integer("world_size") or len(folders),
        info={"writer": "Megatron-LM, one folder per model-parallel rank"} | args.info(),
    )
    return keep_first_arguments(catalog)


def _drop_refused(fragments: Fragments, conflicts: Mapping[str, str]) -> Fragments:
    """Return the entries that no rank refuses; an entry that only some ranks refuse is a tensor."""
    for path in fragments:
        why = conflicts.get(flat_name(path))
        if isinstance(why, Refusal):
            why.may_be_tensor = True
    return {path: parts for path, parts in fragments.items() if flat_name(path) not in conflicts}


def _prepare(folders: list[RankFolder], args: Arguments) -> _ModelRanks:
    """Return the model's degrees, layer numbers, and names of tied parameters.

    Rules that the user gave follow once all names are known.
    """
    runs = {
        (folder.rank[1], virtual): list(params)
        for folder in folders
        for virtual, params in folder.runs.items()
    }
    sizes = count_degrees([folder.rank for folder in folders])
    names = {name for run in runs.values() for name in run}
    names |= {name for folder in folders for name in _list_refused(folder)}
    word = next((n for n in names if n.endswith(EMBEDDING)), None)
    heads = (name for name in names if name.endswith(_HEADS))
    return _ModelRanks(
        ParameterRules(args, sizes, given_rules((), ())),
        find_layer_offsets(runs),
        dict.fromkeys(heads, word) if word and args.tied else {},
    )


def _read_model(folder: RankFolder, ranks: _ModelRanks) -> None:
    """Add a rank's model; of a parameter with two names, the optimizer knows only the first."""
    experts = folder.experts
    stacked = ranks.rules.args.integer("num_experts")
    if experts is None and stacked is not None:
        experts = stacked // ranks.rules.degrees[2]
    places = set()
    for virtual, run in sorted(folder.runs.items()):
        parameters = []
        for name, leaf in run.items():
            full = _name_globally(name, folder, virtual, ranks, experts)
            parameter = _make_parameter(full, folder, leaf, experts)
            ranks.rules.shapes.setdefault(full, parameter.local)
            shard = whole_tensor(full, (), leaf.dtype, leaf.shape, leaf.place, folder.number)
            ranks.fragments.setdefault(("model", full), []).append((parameter, shard))
            if not is_buffer(name) and leaf.place not in places:
                parameters.append(parameter)
            places.add(leaf.place)
        ranks.parameters.setdefault(folder.number, []).append(parameters)


def _name_globally(
    name: str, folder: RankFolder, virtual: int, ranks: _ModelRanks, experts: int | None
) -> str:
    """Return the name in the whole model; a tied head gets the embedding's name."""
    layered = number_layer(name, ranks.offsets[folder.rank[1], virtual])
    return ranks.tied.get(name) or number_expert(layered, folder.rank[2] * (experts or 0))


def _make_parameter(
    name: str, folder: RankFolder, leaf: PlainLeaf, experts: int | None
) -> LocalParameter:
    tensor = leaf.tensor
    local = view_experts(name, tensor.shape, experts) if experts else tensor.shape
    view = None if tensor.fills_storage else (tensor.storage.key, tensor.offset)
    return LocalParameter(name, folder.rank, local, tensor.dtype, view, local != tensor.shape)


def _read_optimizer(source: Source, folder: RankFolder, ranks: _ModelRanks) -> None:
    """Add the rank's optimizer state by name, or a conflict if the names are unknown."""
    runs = ranks.parameters[folder.number]
    expert_parallel = ranks.rules.degrees[2] > 1
    file = folder.distributed
    try:
        if file is not None:
            ranks.notes += note_stray_keys(file.what, find_stray_keys(file.value))
            expected = [
                group_parameters(runs, experts=experts, expert_parallel=expert_parallel)
                for experts in ((False, True) if expert_parallel else (False,))
            ]
            buffers = match_buffers(read_buffers(file, folder.number), expected)
            add_fragments(ranks.fragments, read_gathered(source, buffers, bool(ranks.tied)))
        elif _has_state(folder.optimizer):
            parameters = [parameter for run in runs for parameter in run]
            state, rules = read_numbered(
                folder.file, folder.optimizer, parameters, expert_parallel, folder.number
            )
            add_fragments(ranks.fragments, state)
            ranks.rules.stated |= rules
    except Undetermined as error:
        ranks.conflicts[_STATE] = (
            f"{_STATE}: cannot determine which parameters the optimizer's state belongs to: {error}"
            f" ({(file or folder.file).what})"
        )


def _is_refused(folder: RankFolder) -> bool:
    """Return whether part of a rank's optimizer is unreadable, so that none of it is placed.

    The optimizer lists the parameters in the order of the model, part of which may be refused.
    """
    leaves = folder.rest.values()
    refused = [leaf for leaf in leaves if isinstance(leaf.value, Refusal)]
    return any(leaf.path[0] == "optimizer" for leaf in refused) or any(_list_refused(folder))


def _list_refused(folder: RankFolder) -> Iterator[str]:
    """Yield the names, on the rank, of refused parts of its model."""
    for leaf in folder.rest.values():
        if find_virtual_stage(leaf.path) is not None and isinstance(leaf.value, Refusal):
            yield flat_name(leaf.path[1:])


def _has_state(value: Any) -> bool:
    """Return whether any of the optimizers holds states by number (else they are distributed)."""
    optimizers = value if isinstance(value, list) else [value]
    inner = [part.get("optimizer", part) for part in optimizers if isinstance(part, dict)]
    return any(isinstance(part, dict) and part.get("state") for part in inner)


def _collect_others(folders: list[RankFolder], ranks: _ModelRanks) -> dict[int, dict[str, Leaf]]:
    """Return each rank's other values, with the whole model's layer numbers."""
    by_rank: dict[int, dict[str, Leaf]] = {}
    for folder in folders:
        experts = folder.experts
        values = by_rank.setdefault(folder.number, {})
        for leaf in folder.rest.values():
            path = _rename_path(leaf.path, folder, ranks, experts)
            name, value = flat_name(path), leaf.value
            if isinstance(value, Refusal):
                value = value.called(name)
            values[name] = Leaf(path, value, isinstance(value, PlainLeaf))
    return by_rank


def _rename_path(path: Path, folder: RankFolder, ranks: _ModelRanks, experts: int | None) -> Path:
    """Return the path of a value in the whole model; random states by pipeline and tensor rank."""
    first = str(path[0])
    if first == _RANDOM:
        tensor, pipeline, expert = folder.rank
        has_experts = ranks.rules.degrees[2] > 1
        numbers = (pipeline, tensor, expert) if has_experts else (pipeline, tensor)
        return (_RANDOM, *map(str, numbers), *path[1:])
    virtual = find_virtual_stage(path)
    if virtual is None or (folder.rank[1], virtual) not in ranks.offsets:
        return path
    return ("model", _name_globally(flat_name(path[1:]), folder, virtual, ranks, experts))
