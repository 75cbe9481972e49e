"""The distributed optimizer's state of a ``torch_dist`` checkpoint, split into parameters.

The chunks show which parameters a model-parallel rank has: those of tensor-parallel parameters are
on a grid, those of a pipeline stage were written by its ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.sharding.tensor_parallel import RankCut, fit_rank
from ckptool.core.state_category import state_category
from ckptool.errors import Undetermined
from ckptool.formats.companions import MOST_EXPERTS
from ckptool.formats.dcp import SavePlan
from ckptool.formats.megatron.model import EMBEDDING, Arguments, find_arguments, is_expert
from ckptool.formats.megatron.optimizer.buckets import (
    Group,
    find_bucket_group,
    group_buckets,
    group_parameters,
    read_buckets,
)
from ckptool.formats.megatron.optimizer.order import (
    EXPERTS,
    Layer,
    group_layers,
    is_local,
    is_stacked_expert,
    join_gates,
    name_module,
    order_layer,
    order_outer,
)
from ckptool.formats.megatron.optimizer.torch import (
    GatheredBuffer,
    find_param_dtype,
    match_buffers,
    read_gathered,
)
from ckptool.formats.megatron.tensor_parallel import (
    Fragments,
    LocalParameter,
    Rank,
    add_fragments,
    merge_fragments,
)
from ckptool.serialization.source import Source

_GATHERED = re.compile(
    r"(?:chained_([0-9]{1,3})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,7})\.param_state"
)
_BY_BUCKET = "the optimizer's state is kept by bucket, for its parameters are not known"
_EMBEDDINGS = (EMBEDDING, "embedding.position_embeddings.weight")
_PREDICTION = "mtp.layers."


def name_state(source: Source, catalog: Catalog, plans: list[SavePlan]) -> Catalog:
    """Replace a catalog's buckets with ``fp32.<name>``, ``exp_avg.<name>``, ...

    If the parameters in them are not known for certain, the buckets stay, and a note says why.
    """
    tensors = catalog.tensors.values()
    state = {e.name: e for e in tensors if find_bucket_group(e.name) or _find_group(e)}
    if not state:
        return catalog
    rest = {name: entry for name, entry in catalog.tensors.items() if name not in state}
    model = {name: entry for name, entry in rest.items() if state_category(entry) == "model"}
    args = find_arguments(catalog.objects.values())
    stages = Stages(model, plans, args, _find_writers(state.values()))
    try:
        fragments = _read_fragments(source, state.values(), stages)
    except Undetermined as error:
        return replace(catalog, notes=(*catalog.notes, f"{_BY_BUCKET}: {error}"))
    parameters, conflicts = merge_fragments(attrgetter("fit"), fragments)
    objects = {n: e for n, e in catalog.objects.items() if not _GATHERED.match(n)}
    return replace(
        catalog,
        tensors=rest | parameters,
        objects=objects,
        conflicts=catalog.conflicts | conflicts,
    )


def _read_fragments(source: Source, state: Iterable[TensorEntry], stages: Stages) -> Fragments:
    fragments: Fragments = {}
    entries = list(state)
    for group, buffers in group_buckets(entries).items():
        add_fragments(fragments, read_buckets(buffers, stages.list_buffers(group)))
    for group, saved in _group_gathered(entries).items():
        pairs = match_buffers([saved], [stages.list_buffers(group)])
        add_fragments(fragments, read_gathered(source, pairs, stages.args.tied))
    return fragments


def _find_group(entry: TensorEntry) -> Group | None:
    """Return the group whose gathered state (``dp_zero_gather_scatter``) includes the tensor."""
    match = _GATHERED.fullmatch(str(entry.path[0]))
    return (int(match[1] or 0), int(match[2])) if match and len(entry.path) == 4 else None


def _group_gathered(entries: Iterable[TensorEntry]) -> dict[Group, list[GatheredBuffer]]:
    """Return each group's gathered buffers: paths are key, buffer, element types, kind of state."""
    groups: dict[Group, dict[str, GatheredBuffer]] = {}
    for entry in entries:
        group = _find_group(entry)
        if group is None or len(entry.shape) != 1:
            continue
        _, number, dtypes, kind = entry.path
        buffers = groups.setdefault(group, {})
        buffer = buffers.setdefault(str(number), GatheredBuffer(find_param_dtype(dtypes), {}))
        buffer.vectors[str(kind)] = entry
    return {group: [b[key] for key in sorted(b, key=_parse_number)] for group, b in groups.items()}


def _parse_number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _find_writers(state: Iterable[TensorEntry]) -> dict[Group, set[int]]:
    """Return the ranks that wrote each group's state."""
    writers: dict[Group, set[int]] = {}
    for entry in state:
        group = find_bucket_group(entry.name) or _find_group(entry)
        if group is not None:
            ranks = {chunk.rank for chunk in entry.chunks if chunk.rank is not None}
            writers.setdefault(group, set()).update(ranks)
    return writers


class Stages(Struct, dict=True):
    """The model's tensors, and the group of each rank of the save.

    ``orders`` caches the orders of layers by their keys.
    """

    model: dict[str, TensorEntry]
    plans: Sequence[SavePlan]
    args: Arguments
    writers: Mapping[Group, set[int]]
    orders: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    def list_buffers(self, group: Group) -> list[list[LocalParameter]]:
        """Return the parameters of each of a group's buffers. Raises Undetermined."""
        experts = group[0] > 0
        rank = self._find_rank(group[1], experts)
        parallel = self.args.degree("EP") > 1
        return group_parameters(self._list_runs(rank), experts=experts, expert_parallel=parallel)

    def _find_rank(self, group: int, experts: bool) -> Rank:
        tensor, pipeline = self.args.degree("TP"), self.args.degree("PP")
        expert = self.args.degree("EP") if experts else 1
        if experts:
            tensor = self.args.integer("expert_tensor_parallel_size") or tensor
        rank = group % tensor, group // (tensor * expert), group // tensor % expert
        if rank[1] >= pipeline:
            raise Undetermined(
                f"group {group} is beyond TP {tensor}, EP {expert} and PP {pipeline}"
            )
        return rank

    def _list_runs(self, rank: Rank) -> list[list[LocalParameter]]:
        """Return a rank's parameters by virtual pipeline stage."""
        ranks = {writer for writer, stage in self._stage_of.items() if stage == rank[1]}
        outer_keys, layers = group_layers(self._whole.values(), ranks)
        embeddings, norms, heads = order_outer(outer_keys)
        prediction = [layer for layer in layers.values() if layer.prefix == _PREDICTION]
        main_layers = [layer for layer in layers.values() if layer.prefix != _PREDICTION]
        runs = [list(self._list_layers(run, rank)) for run in self._split_virtual(main_layers)]
        runs[0] = [*self._list_outer(embeddings, rank), *runs[0]]
        if prediction and rank[1]:
            copied = [name for name in _EMBEDDINGS if name in self.model]
            runs[-1] = [*self._list_outer(copied, rank), *runs[-1]]
        runs[-1] += [*self._list_outer(norms, rank), *self._list_layers(prediction, rank)]
        runs[-1] += [*self._list_outer(heads, rank), *self._list_tied(rank)]
        return runs

    @cached_property
    def _whole(self) -> dict[str, TensorEntry]:
        return join_gates(self.model)

    @cached_property
    def _stage_of(self) -> dict[int, int]:
        """The pipeline stage of each rank of the save.

        Ranks are laid out with the stages outermost, or inside data parallelism
        (``--use-tp-pp-dp-mapping``); the buckets that a rank wrote show which.
        """
        pipeline, tensor = self.args.degree("PP"), self.args.degree("TP")
        world = max([len(self.plans), *(n + 1 for ranks in self.writers.values() for n in ranks)])
        stages = {
            writer: self._find_rank(group[1], group[0] > 0)[1]
            for group, writers in self.writers.items()
            for writer in writers
        }
        outermost = {rank: rank * pipeline // world for rank in range(world)}
        innermost = {rank: rank // tensor % pipeline for rank in range(world)}
        for layout in (outermost, innermost):
            if stages.items() <= layout.items():
                return layout
        raise Undetermined("its ranks are laid out in neither of Megatron's orders")

    def _split_virtual(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        """Split a stage's layers by virtual stage: of several, runs of consecutive numbers."""
        prefixes = sorted({layer.prefix for layer in layers})
        if len(prefixes) != 1:
            raise Undetermined(
                f"layers have {len(prefixes)} names: {', '.join(prefixes) or 'none'}"
            )
        virtual = self.args.degree("VPP")
        if virtual == 1:
            return [list(layers)]
        runs = [
            [layer for _, layer in run]
            for _, run in groupby(enumerate(layers), key=lambda pair: pair[1].number - pair[0])
        ]
        if len(runs) != virtual:
            raise Undetermined(f"{len(runs)} runs of layers in a stage of {virtual} virtual stages")
        return runs

    def _list_layers(self, layers: Iterable[Layer], rank: Rank) -> Iterator[LocalParameter]:
        for layer in layers:
            order = self._order_keys(tuple(sorted(layer.keys)))
            local = is_local(order)
            for key in order:
                if not is_stacked_expert(key):
                    name = name_module(layer.prefix, layer.number, key, local=local)
                    yield self._make_parameter(name, layer.keys[key][None], rank, layer.stacked)
            experts = [key for key in order if is_stacked_expert(key)]
            yield from self._list_experts(layer, experts, rank)

    def _order_keys(self, keys: tuple[str, ...]) -> list[str]:
        if keys not in self.orders:
            self.orders[keys] = order_layer(keys, self.plans, self.args.transformer)
        return self.orders[keys]

    def _list_experts(
        self, layer: Layer, keys: Sequence[str], rank: Rank
    ) -> Iterator[LocalParameter]:
        """Yield the rank's experts: one by one, or all of a grouped layer's weights first."""
        if not keys:
            return
        if self.args.values.get("moe_use_legacy_grouped_gemm"):
            raise Undetermined("its experts' weights are stored transposed")
        numbers = self._number_experts(layer, layer.keys[keys[0]], rank)
        grouped = bool(self.args.values.get("moe_grouped_gemm"))
        pairs = (
            [(key, n) for key in keys for n in numbers]
            if grouped
            else [(key, n) for n in numbers for key in keys]
        )
        for key, number in pairs:
            parent, _, last = key.partition(EXPERTS)
            inner = f"{last}{number}" if grouped else f"local_experts.{number}.{last}"
            name = f"{layer.prefix}{layer.number}.{parent}mlp.experts.{inner}"
            stored = layer.keys[key]
            if None in stored:
                yield self._make_parameter(name, stored[None], rank, layer.stacked + 1)
            else:
                yield self._make_parameter(name, stored[number], rank, layer.stacked)

    def _number_experts(
        self, layer: Layer, stored: Mapping[int | None, str], rank: Rank
    ) -> Sequence[int]:
        """Return the numbers of the experts on a rank, for a stacked key or a key each."""
        degree = self.args.degree("EP")
        stacked = stored.get(None)
        if stacked is None:
            count = self.args.integer("num_experts") or len(stored)
        else:
            count = self._whole[stacked].shape[layer.stacked]
        if count % degree or count > MOST_EXPERTS:
            raise Undetermined(f"{count:,} experts on {degree:,} expert-parallel ranks")
        numbers = range(rank[2] * count // degree, (rank[2] + 1) * count // degree)
        if stacked is None and not stored.keys() >= set(numbers):
            raise Undetermined(f"keys of experts {sorted(map(str, stored))}, of {count} in all")
        return numbers

    def _list_outer(self, names: Sequence[str], rank: Rank) -> Iterator[LocalParameter]:
        for name in names:
            yield self._make_parameter(name, name, rank, 0)

    def _list_tied(self, rank: Rank) -> Iterator[LocalParameter]:
        """Yield the last stage's own copy of an embedding that the output layer shares."""
        last = self.args.degree("PP") - 1
        if 0 < last == rank[1] and self.args.tied and EMBEDDING in self.model:
            yield self._make_parameter(EMBEDDING, EMBEDDING, rank, 0)

    def _make_parameter(self, name: str, key: str, rank: Rank, prepended: int) -> LocalParameter:
        entry = self._whole[key]
        degree = self.args.degree("TP")
        if is_expert(name):
            degree = self.args.integer("expert_tensor_parallel_size") or degree
        cuts, local = _find_cuts(entry, rank[0] % degree, degree, prepended)
        return LocalParameter(name, rank, local, entry.dtype, fit=fit_rank(local, cuts))


def _find_cuts(
    entry: TensorEntry, index: int, degree: int, prepended: int
) -> tuple[list[RankCut], tuple[int, ...]]:
    """Return a tensor's tensor-parallel cuts, from its chunks, and a rank's shape."""
    whole = entry.shape[prepended:]
    shapes = {chunk.box.shape[prepended:] for chunk in entry.chunks}
    if len(shapes) != 1:
        raise Undetermined(f"{entry.name} is not cut evenly")
    local = list(shapes.pop())
    cuts = []
    for dim, (size, part) in enumerate(zip(whole, local, strict=True)):
        blocks = size // part // degree if part and size % part == 0 else 0
        if size == part:
            continue
        if blocks not in (1, 2) or blocks * degree * part != size:
            raise Undetermined(f"{entry.name} is cut into {size} / {part} parts along dim {dim}")
        cuts.append(RankCut(dim, index, degree, (1,) * blocks))
        local[dim] = part * blocks
    return cuts, tuple(local)
