"""A DeepSpeed checkpoint's files, read, and the degrees of parallelism they were written with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_files import Files, Ranks, require_all
from ckptool.formats._deepspeed_parallel import Grid
from ckptool.formats._deepspeed_read import State, read_optimizer, read_state
from ckptool.formats._deepspeed_slots import Partition
from ckptool.formats._refusing import Barred
from ckptool.formats.base import Source


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
        """The optimizer files of one ``mp`` rank, by data-parallel rank."""
        return [
            Partition(self.optimizers[dp, mp].inner("optimizer_state_dict"), dp, self.rank(dp, mp))
            for dp in range(self.grid.data)
            if (dp, mp) in self.optimizers
        ]

    def rank(self, dp: int, mp: int) -> int:
        """The global rank of a data-parallel and a model-parallel one."""
        return self.grid.rank(dp, mp)


def read_checkpoint(source: Source, files: Files) -> Checkpoint:
    """All states of a tag. Raises Damaged where the file of a rank is missing."""
    if not files.models:
        message = f"{source.root}: no file of model states in the folder of the tag"
        raise Damaged(Problem(message, "file-missing"))
    models = {ranks: read_state(source, file) for ranks, file in files.models.items()}
    first = models[min(models)]
    optimizers = {ranks: read_optimizer(source, file) for ranks, file in files.optimizers.items()}
    grid = _grid(files, first, optimizers)
    return Checkpoint(source, files, models, optimizers, grid)


def _grid(files: Files, first: State, optimizers: Mapping[Ranks, State]) -> Grid:
    """The degrees of parallelism; Damaged where the file of a rank is missing."""
    model_ranks = first.count("mp_world_size", 1 + max(mp for _, mp in files.models))
    data = _data_ranks(files, first, optimizers)
    what = "the file of model states"
    require_all(files.models, data if files.stage_3 else 1, model_ranks, what)
    if optimizers:
        require_all(files.optimizers, data, model_ranks, "the file of optimizer states")
    tensor = _tensor_ranks(files, first, model_ranks)
    if model_ranks % tensor:
        raise Damaged(
            Problem(
                f"{first.file.what}: {model_ranks} model ranks with {tensor} tensor ranks",
                "ranks-disagree",
            )
        )
    return Grid(model_ranks // tensor, data, tensor)


def _data_ranks(files: Files, first: State, optimizers: Mapping[Ranks, State]) -> int:
    """The number of data-parallel ranks, which partition_count tells for each group of them.

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
    """The number of data-parallel ranks by ``partition_count``."""
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
