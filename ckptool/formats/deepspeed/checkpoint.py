"""A DeepSpeed checkpoint's files, read, and what its ranks hold, merged.

A DeepSpeed checkpoint's files, read, and the degrees of parallelism they were written with.

Merge what tensor-parallel and pipeline ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.catalog import RankStep, TensorEntry, merge_copies
from ckptool.core.sharding.tensor_parallel import (
    RankShard,
    TpRule,
    fit_ranks,
    merge_shards,
    named_rule,
    require_matched,
    unmerged,
)
from ckptool.errors import Damaged, Refusal, Undetermined
from ckptool.formats.base import ScanOptions
from ckptool.formats.deepspeed.files import Files, Ranks, require_all
from ckptool.formats.deepspeed.partitions import Name, Partition, RankContents
from ckptool.formats.deepspeed.states import State, read_optimizer, read_state
from ckptool.formats.deepspeed.tensor_parallel import fit_shards
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import Assembled, Barred


@dataclass(slots=True)
class Checkpoint:
    """All states of one tag."""

    source: Source
    files: Files
    models: dict[Ranks, State]
    optimizers: dict[Ranks, State]
    grid: Grid
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> State:
        """The model file of the first rank."""
        return self.models[0, 0]

    @property
    def aliases(self) -> dict[str, str]:
        """Tied parameters' other names, to the name that holds the data."""
        return {
            str(alias): str(name)
            for state in self.models.values()
            for alias, name in state.mapping("shared_params").items()
        }

    def partitions(self, mp: int) -> list[Partition]:
        """Return the optimizer files of one ``mp`` rank, by data-parallel rank."""
        return [
            Partition(self.optimizers[dp, mp].inner("optimizer_state_dict"), dp, self.rank(dp, mp))
            for dp in range(self.grid.data)
            if (dp, mp) in self.optimizers
        ]

    def rank(self, dp: int, mp: int) -> int:
        """Return the global rank of a data-parallel and a model-parallel one."""
        return self.grid.rank(dp, mp)


def read_checkpoint(source: Source, files: Files) -> Checkpoint:
    """Return all states of a tag. Raises Damaged where the file of a rank is missing."""
    if not files.models:
        message = f"{source.root}: no model states in the folder of the tag"
        raise Damaged(message, "file-missing")
    models = {ranks: read_state(source, file) for ranks, file in files.models.items()}
    first = models[min(models)]
    optimizers = {ranks: read_optimizer(source, file) for ranks, file in files.optimizers.items()}
    grid = _grid(files, first, optimizers)
    return Checkpoint(source, files, models, optimizers, grid)


def _grid(files: Files, first: State, optimizers: Mapping[Ranks, State]) -> Grid:
    """Return the degrees of parallelism; Damaged where the file of a rank is missing."""
    model_ranks = first.count("mp_world_size", 1 + max(mp for _, mp in files.models))
    data = _data_ranks(files, first, optimizers)
    what = "the file of model states"
    require_all(files.models, data if files.stage_3 else 1, model_ranks, what)
    if optimizers:
        require_all(files.optimizers, data, model_ranks, "the file of optimizer states")
    tensor = _tensor_ranks(files, first, model_ranks)
    if model_ranks % tensor:
        raise Damaged(
            f"{first.file.what}: {model_ranks} model ranks with {tensor} tensor ranks",
            "ranks-disagree",
        )
    return Grid(model_ranks // tensor, data, tensor)


def _data_ranks(files: Files, first: State, optimizers: Mapping[Ranks, State]) -> int:
    """Return the number of data-parallel ranks, which partition_count tells for each group of them.

    Where that cannot be read, the files are counted: nothing of an optimizer is placed then.
    """
    if not optimizers:
        ranks = 1 + max(dp for dp, _ in files.models)
        return ranks if files.stage_3 else first.count("dp_world_size")
    state = optimizers[min(optimizers)].inner("optimizer_state_dict")
    try:
        return _stated_ranks(files, first, state)
    except Barred:
        return 1 + max(dp for dp, _ in files.optimizers)


def _stated_ranks(files: Files, first: State, state: State) -> int:
    """Return the number of data-parallel ranks by ``partition_count``."""
    counts = state.get("partition_count")
    if isinstance(counts, list | tuple) and counts and all(type(c) is int for c in counts):
        experts_only = first.count("dp_world_size") if first.get("num_experts") else 1
        return max([*map(int, counts), experts_only])
    return state.count("partition_count", 1 + max(dp for dp, _ in files.optimizers))


def _tensor_ranks(files: Files, first: State, model_ranks: int) -> int:
    """The tensor-parallel degree: stated since 0.19, else by the layers' files, else all ranks."""
    stated = first.inner("checkpoint_parallel_dimensions")
    if stated.fields:
        return stated.count("tp_degree")
    if files.layers:
        return 1 + max(tensor for _, tensor in files.layers)
    return model_ranks


_TIED = "tied_modules."


@dataclass(frozen=True, slots=True)
class Grid:
    """The degrees of parallelism. ``mp`` ranks count stages, then tensor-parallel ranks."""

    pipeline: int
    data: int
    tensor: int

    @property
    def size(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def model(self) -> int:
        """The number of model-parallel ranks."""
        return self.pipeline * self.tensor

    def rank(self, dp: int, mp: int) -> int:
        """Return the global rank, as Megatron and DeepSpeed's pipelines count."""
        stage, tensor = divmod(mp, self.tensor)
        return (stage * self.data + dp) * self.tensor + tensor


def merge_into(
    result: Assembled,
    holdings: Sequence[RankContents],
    grid: Grid,
    info: Mapping[str, Any],
    options: ScanOptions,
) -> None:
    """Add the tensors of all model-parallel ranks to what was assembled.

    Shards that nothing says how to join become conflicts, or ``NAME@rankR`` with ``per_rank``.
    A rule that was given decides before ``info`` does. What a rank has refused is left out.
    """
    names = {name[1] for holding in holdings for name in holding.tensors}
    refused = {n for n, why in result.conflicts.items() if isinstance(why, Refusal)}
    require_matched(options.tp_rules, sorted(names))
    for name in dict.fromkeys(name for holding in holdings for name in holding.tensors):
        if ".".join(name) in refused:
            continue
        try:
            shards = _shards(name, _held(name, holdings), grid)
        except Damaged as error:
            if not refused:
                raise
            result.conflicts[".".join(name)] = _lacking(name, error)
            continue
        try:
            entry = _joined(name, shards, info, named_rule(options.tp_rules, name[1]))
        except Undetermined as why:
            _keep_apart(result, name, shards, grid, why, options.per_rank)
        else:
            result.tensors[entry.name] = entry


def _lacking(name: Name, error: Damaged) -> Refusal:
    """Why a tensor is refused of which a rank has no shard, where ranks have some refused."""
    text, why = ".".join(name), error.message
    found = Refusal(why, why.code, file=why.file, tensor=text)
    found.part = "model" if name[0] in ("module", "frozen", "buffer") else "optimizer"
    found.derived = True
    return found


def _held(name: Name, holdings: Sequence[RankContents]) -> dict[int, RankShard]:
    """Return a tensor's shards by ``mp`` rank.

    Automatic tensor parallelism gives a rank without heads an empty shard, which its optimizer
    leaves out.
    """
    found = {mp: h.tensors[name] for mp, h in enumerate(holdings) if name in h.tensors}
    dtype = next(iter(found.values())).dtype
    for mp, holding in enumerate(holdings):
        weight = holding.tensors.get(("module", name[1]))
        if mp not in found and weight is not None and not math.prod(weight.shape):
            found[mp] = RankShard(dtype, weight.shape)
    return dict(sorted(found.items()))


def whole_entries(holding: RankContents) -> dict[str, TensorEntry]:
    """Return the tensors of a holding that is not one rank's, but all ranks' together."""
    joined = (_joined(name, {0: local}, {}, None) for name, local in holding.tensors.items())
    return {entry.name: entry for entry in joined}


def _shards(name: Name, held: Mapping[int, RankShard], grid: Grid) -> dict[int, RankShard]:
    """Return the shards of the first stage that holds a tensor, by ``mp`` rank.

    Only tied modules are held by several stages, and those keep them equal.
    """
    stages = sorted({mp // grid.tensor for mp in held})
    if len(stages) > 1 and not name[1].startswith(_TIED):
        raise Damaged(
            f"{'.'.join(name)}: pipeline stages {stages} hold it, but it is not tied",
            "ranks-disagree",
        )
    first = stages[0] * grid.tensor
    missing = [mp for mp in range(first, first + grid.tensor) if mp not in held]
    if missing:
        message = f"{'.'.join(name)}: mp_rank {missing[0]:02d} has no shard of it"
        raise Damaged(message, "rank-missing", tensor=".".join(name))
    return {mp: held[mp] for mp in range(first, first + grid.tensor)}


def _joined(
    name: Name, shards: Mapping[int, RankShard], info: Mapping[str, Any], rule: TpRule | None
) -> TensorEntry:
    locals_ = list(shards.values())
    first, text = locals_[0], ".".join(name)
    if len(locals_) == 1:
        return TensorEntry(text, name, first.dtype, first.shape, merge_copies(first.chunks))
    if len({local.dtype for local in locals_}) > 1:
        message = f"{text}: the tensor-parallel ranks hold it in several element types"
        raise Damaged(message, "ranks-disagree", tensor=text)
    shapes = [local.shape for local in locals_]
    fits = fit_shards(name[1], shapes, info) if rule is None else fit_ranks(shapes, rule)
    if all(fit.is_whole for fit in fits):
        locals_ = _chunked_alike(locals_)
    return merge_shards(text, name, locals_, fits[: len(locals_)])


def _chunked_alike(copies: Sequence[RankShard]) -> list[RankShard]:
    """Return the copies of a tensor that are cut into the same chunks as the first."""
    boxes = {chunk.box for chunk in copies[0].chunks}
    return [copy for copy in copies if {chunk.box for chunk in copy.chunks} == boxes]


def _keep_apart(
    result: Assembled,
    name: Name,
    shards: Mapping[int, RankShard],
    grid: Grid,
    why: Undetermined,
    per_rank: bool,
) -> None:
    text = ".".join(name)
    if not per_rank:
        shapes = [local.shape for local in shards.values()]
        result.conflicts[text] = unmerged(text, name[1], shapes, why, "sharding-unrecorded")
        return
    for mp, local in shards.items():
        rank = grid.rank(0, mp)
        one = f"{text}@rank{rank}"
        path = (name[0], RankStep(name[1], rank))
        chunks = merge_copies(local.chunks)
        result.tensors[one] = TensorEntry(one, path, local.dtype, local.shape, chunks)
