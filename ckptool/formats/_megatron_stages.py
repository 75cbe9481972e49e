"""Which parameters each model-parallel rank of a ``torch_dist`` checkpoint has, in their order.

A rank's part shows in the chunks: those of tensor-parallel parameters lie on a grid, those of a
pipeline stage were written by its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ckptool.core.catalog import TensorEntry
from ckptool.core.tp_rules import Cut, Fit, fit
from ckptool.formats._dcp_metadata import Plan
from ckptool.formats._megatron_args import Arguments
from ckptool.formats._megatron_buckets import Group
from ckptool.formats._megatron_distrib import expected_buffers
from ckptool.formats._megatron_names import is_buffer
from ckptool.formats._megatron_order import (
    is_local,
    is_stacked_expert,
    layer_order,
    module_name,
    outer_order,
    stacked,
)
from ckptool.formats._megatron_params import Held, Rank
from ckptool.formats._megatron_state import Unnamed

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass
class Stages:
    """The model's tensors, and which ranks of the save belong to which group.

    ``fits`` fills up with the places of the parameters that were asked for.
    """

    model: dict[str, TensorEntry]
    plans: Sequence[Plan]
    args: Arguments
    writers: Mapping[Group, frozenset[int]]
    fits: dict[Held, Fit]

    def fit_of(self, held: Held) -> Fit | str:
        """Where a rank's parameter belongs in the whole one."""
        return self.fits[held] if held.local else fit((), ())

    def expected(self, group: Group) -> list[list[Held]]:
        """The parameters of each of a group's buffers. Raises Unnamed where that is not known."""
        experts = group[0] > 0
        rank = self._rank(group[1], experts)
        runs = [
            [one for one in run if experts == (self.args.degree("EP") > 1 and _is_expert(one))]
            for run in self._runs(rank)
        ]
        return expected_buffers(runs, expert_parallel=False)[0]

    def _rank(self, group: int, experts: bool) -> Rank:
        tensor, pipeline = self.args.degree("TP"), self.args.degree("PP")
        expert = self.args.degree("EP") if experts else 1
        if experts:
            tensor = self.args.integer("expert_tensor_parallel_size") or tensor
        rank = group % tensor, group // (tensor * expert), group // tensor % expert
        if rank[1] >= pipeline:
            raise Unnamed(f"group {group} is beyond TP {tensor}, EP {expert} and PP {pipeline}")
        return rank

    def _runs(self, rank: Rank) -> list[list[Held]]:
        """A rank's parameters by virtual pipeline stage."""
        names, layers = self._in_stage(rank[1])
        inner = self._layer_keys(names)
        before, after = outer_order([name for name in names if stacked(name) is None])
        runs = self._virtual(layers)
        found = [[one for n in run for one in self._layer(n, inner, rank)] for run in runs]
        found[0] = [*self._outer(before, rank), *found[0]]
        found[-1] += [*self._outer(after, rank), *self._tied(rank)]
        return found

    def _in_stage(self, stage: int) -> tuple[list[str], list[int]]:
        """The keys of which a pipeline stage's ranks wrote a chunk, and its layers' numbers."""
        names, layers = [], set()
        for name, entry in self.model.items():
            mine = [c for c in entry.chunks if self._stage_of.get(c.rank or 0) == stage]
            if mine and not is_buffer(name):
                names.append(name)
                layers |= {chunk.box.lo[0] for chunk in mine} if stacked(name) else set()
        return names, sorted(layers)

    @cached_property
    def _stage_of(self) -> dict[int, int]:
        """The pipeline stage of each rank of the save.

        Ranks are laid out with the stages outermost, or inside data parallelism
        (``--use-tp-pp-dp-mapping``); whose buckets a rank wrote tells which it is.
        """
        pipeline, tensor = self.args.degree("PP"), self.args.degree("TP")
        world = max([len(self.plans), *(n + 1 for ranks in self.writers.values() for n in ranks)])
        known = {
            writer: self._rank(group[1], group[0] > 0)[1]
            for group, writers in self.writers.items()
            for writer in writers
        }
        outermost = {rank: rank * pipeline // world for rank in range(world)}
        inside = {rank: rank // tensor % pipeline for rank in range(world)}
        for layout in (outermost, inside):
            if known.items() <= layout.items():
                return layout
        raise Unnamed("its ranks are laid out in neither of Megatron's orders")

    def _virtual(self, layers: Sequence[int]) -> list[list[int]]:
        """A stage's layers by virtual stage: with several stages, runs of consecutive numbers."""
        virtual = self.args.degree("VPP")
        if virtual == 1:
            return [list(layers)]
        runs = [
            [layer for _, layer in run]
            for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
        ]
        if len(runs) != virtual:
            raise Unnamed(f"{len(runs)} runs of layers in a stage of {virtual} virtual stages")
        return runs

    def _layer_keys(self, names: Iterable[str]) -> tuple[str, list[str]]:
        """What precedes the layers' numbers, and the keys of a layer in their order."""
        found = [key for name in names if (key := stacked(name))]
        prefixes = sorted({prefix for prefix, _ in found})
        if len(prefixes) != 1:
            raise Unnamed(f"layers have {len(prefixes)} names: {', '.join(prefixes) or 'none'}")
        keys = tuple(sorted(inner for _, inner in found))
        if keys not in self._orders:
            self._orders[keys] = layer_order(keys, self.plans, self.args.transformer)
        return prefixes[0], self._orders[keys]

    @cached_property
    def _orders(self) -> dict[tuple[str, ...], list[str]]:
        return {}

    def _layer(self, layer: int, keys: tuple[str, list[str]], rank: Rank) -> Iterator[Held]:
        prefix, order = keys
        local = is_local(order)
        for key in order:
            if not is_stacked_expert(key):
                name = module_name(prefix, layer, key, local=local)
                yield self._held(name, self.model[prefix + key], rank, 1)
        experts = [key for key in order if is_stacked_expert(key)]
        yield from self._experts(prefix, layer, experts, rank)

    def _experts(self, prefix: str, layer: int, keys: Sequence[str], rank: Rank) -> Iterator[Held]:
        """The rank's experts: one after the other, or all of a grouped layer's weights first."""
        if not keys:
            return
        count = self.model[prefix + keys[0]].shape[1]
        if count % self.args.degree("EP"):
            raise Unnamed(f"{count} experts on {self.args.degree('EP')} expert-parallel ranks")
        if self.args.values.get("moe_use_legacy_grouped_gemm"):
            raise Unnamed("its experts' weights lie transposed in the buffers")
        mine = count // self.args.degree("EP")
        numbers = range(rank[2] * mine, (rank[2] + 1) * mine)
        grouped = bool(self.args.values.get("moe_grouped_gemm"))
        pairs = (
            [(key, n) for key in keys for n in numbers]
            if grouped
            else [(key, n) for n in numbers for key in keys]
        )
        for key, number in pairs:
            last = key.removeprefix("mlp.experts.experts.")
            name = (
                f"{prefix}{layer}.mlp.experts.{last}{number}"
                if grouped
                else f"{prefix}{layer}.mlp.experts.local_experts.{number}.{last}"
            )
            yield self._held(name, self.model[prefix + key], rank, 2)

    def _outer(self, names: Sequence[str], rank: Rank) -> Iterator[Held]:
        for name in names:
            yield self._held(name, self.model[name], rank, 0)

    def _tied(self, rank: Rank) -> Iterator[Held]:
        """The last stage's own copy of an embedding that the output layer shares."""
        last = self.args.degree("PP") - 1
        untied = self.args.values.get("untie_embeddings_and_output_weights", True)
        if 0 < last == rank[1] and not untied and _EMBEDDING in self.model:
            yield self._held(_EMBEDDING, self.model[_EMBEDDING], rank, 0)

    def _held(self, name: str, entry: TensorEntry, rank: Rank, prepended: int) -> Held:
        cuts, local = self._cuts(entry, rank, prepended)
        held = Held(name, rank, 0, local, entry.dtype)
        self.fits[held] = fit(local, cuts)
        return held

    def _cuts(
        self, entry: TensorEntry, rank: Rank, prepended: int
    ) -> tuple[list[Cut], tuple[int, ...]]:
        """How a tensor is cut among tensor-parallel ranks, from its chunks, and a rank's shape."""
        whole = entry.shape[prepended:]
        shapes = {chunk.box.shape[prepended:] for chunk in entry.chunks}
        if len(shapes) != 1:
            raise Unnamed(f"{entry.name} is not cut evenly")
        local = list(shapes.pop())
        degree = self.args.degree("TP")
        cuts = []
        for dim, (size, part) in enumerate(zip(whole, local, strict=True)):
            blocks = size // part // degree if part and size % part == 0 else 0
            if size == part:
                continue
            if blocks not in (1, 2) or blocks * degree * part != size:
                raise Unnamed(f"{entry.name} is cut into {size} / {part} parts along dim {dim}")
            cuts.append(Cut(dim, rank[0] % degree, degree, blocks))
            local[dim] = part * blocks
        return cuts, tuple(local)


def _is_expert(held: Held) -> bool:
    return ".mlp.experts." in held.name
