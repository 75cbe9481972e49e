"""A DeepSpeed checkpoint: the files of one tag by the ranks in their names, read into states.

A root holds ``latest`` (the tag, as text) and a folder a tag. In names, ``zero_pp_rank`` is the
data-parallel rank and ``mp_rank`` counts pipeline stages and tensor-parallel ranks, the latter
fastest (DeepSpeed 0.3 to 0.19, ``runtime/engine.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.text import plural
from ckptool.errors import Damaged, Problem
from ckptool.formats.deepspeed.states import State, read_optimizer, read_state
from ckptool.serialization.source import Source, find_missing_ranks, require_rank
from ckptool.serialization.state_dict.leaves import Barred

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
OPTIMIZER_STATE = "zero/optimizer_state.pt"
_LONGEST_TAG = 1000
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt")
_PATTERNS = {
    "models": _MODEL,
    "optimizers": re.compile(
        r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_?optim_states\.pt"
    ),
    "layers": re.compile(r"layer_([0-9]{1,9})(?:-model_([0-9]{1,9}))?-model_states\.pt"),
    "experts": re.compile(
        r"(?:layer_([0-9]{1,9})_)?expert_([0-9]{1,9})_mp_rank_([0-9]{1,9})_model_states\.pt"
    ),
    "expert_optimizers": re.compile(
        r"expp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt"
    ),
}
"""The files of a tag by the field of ``TagFiles`` that lists them; their groups are its keys."""

Ranks = tuple[int, int]
"""A data-parallel rank and a model-parallel (``mp``) rank."""


class TagFiles(Struct):
    """The files of one tag. ``stage_3`` means one model file per data-parallel rank.

    ``layers`` are by layer and tensor-parallel rank, ``experts`` by MoE layer, expert and ``mp``
    rank, ``expert_optimizers`` by expert-parallel rank and ``mp`` rank.
    """

    models: dict[Ranks, str] = field(default_factory=dict)
    optimizers: dict[Ranks, str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optimizers: dict[Ranks, str] = field(default_factory=dict)
    stage_3: bool = False

    @property
    def all(self) -> list[str]:
        return [path for kind in _PATTERNS for path in getattr(self, kind).values()]


def is_tag(names: Iterable[str]) -> bool:
    """Return whether a folder with these files is one of DeepSpeed's tags, whole or not."""
    patterns = _MODEL, _PATTERNS["optimizers"]
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)


def drop_copies(paths: Iterable[str]) -> list[str]:
    """Drop the model files of ZeRO 3 if there are others, as in a universal checkpoint."""
    matches = {path: _MODEL.fullmatch(path.rpartition("/")[2]) for path in paths}
    whole = any(match and match[1] is None for match in matches.values())
    return [path for path, m in matches.items() if not (whole and m and m[1] is not None)]


def find_tag_folder(source: Source, marker: str) -> str:
    """Return the folder of the marker's tag, with a slash, or nothing; Damaged if it is missing."""
    size = source.files.get(marker)
    if size is None:
        return ""
    text = source.read(marker, 0, min(size, _LONGEST_TAG)).decode("utf-8", "replace")
    folder = text.strip() + "/"
    if len(folder) > 1 and any(name.startswith(folder) for name in source.files):
        return folder
    tags = ", ".join(list_tags(source)) or "no other tag"
    raise Damaged(
        f"{marker} names the tag {text.strip()[:80]!r}, which does not exist; found: {tags}",
        "file-missing",
        file=marker,
        hint="name the folder of a tag itself",
    )


def list_tags(source: Source) -> list[str]:
    """Return the folders directly below the root that are tags of DeepSpeed."""
    paths = (name.partition("/") for name in source.files if name.count("/") == 1)
    return list(dict.fromkeys(folder for folder, _, name in paths if is_tag([name])))


def find_files(paths: Iterable[str], folder: str) -> TagFiles:
    """Return the files directly in ``folder``. Damaged if two of them claim the same ranks."""
    files = TagFiles()
    for path in paths:
        name = path.removeprefix(folder)
        if path.startswith(folder) and "/" not in name:
            _add_file(files, name, path)
    return files


def _add_file(files: TagFiles, name: str, path: str) -> None:
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        files.stage_3 |= kind == "models" and match[1] is not None
        ranks = tuple(int(number or 0) for number in match.groups())
        require_rank(max(ranks), name)
        first = getattr(files, kind).setdefault(ranks, path)
        if first != path:
            raise Damaged(
                f"{first} and {path} claim the same ranks: two checkpoints lie in one folder",
                "saves-mixed",
                file=path,
                hint="move the files of one of them away",
            )


class Grid(Struct, frozen=True):
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
        """Return the global rank, in the order of Megatron and DeepSpeed's pipelines."""
        stage, tensor = divmod(mp, self.tensor)
        return (stage * self.data + dp) * self.tensor + tensor


class RankState(Struct, frozen=True):
    """A rank's file, its number among the data-parallel ranks, and its global rank."""

    state: State
    dp: int
    rank: int


class DeepSpeedCheckpoint(Struct):
    """All states of one tag; those of layers and experts are read on request."""

    source: Source
    files: TagFiles
    models: dict[Ranks, State]
    optimizers: dict[Ranks, State]
    expert_optimizers: dict[Ranks, State]
    grid: Grid
    notes: list[str] = field(default_factory=list)
    _states: dict[str, State] = field(default_factory=dict)

    @property
    def model(self) -> State:
        """The model file of the first rank."""
        return self.models[0, 0]

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied parameters, mapped to the name that holds the data."""
        return {
            str(alias): str(name)
            for state in self.models.values()
            for alias, name in state.mapping("shared_params").items()
        }

    @property
    def first_optimizer(self) -> State | None:
        """The optimizer's state of the first rank, or None without ZeRO."""
        return self.partitions(0)[0].state if self.optimizers else None

    def select(self, states: Mapping[Ranks, State], mp: int) -> list[RankState]:
        """Return the states of one ``mp`` rank, by data-parallel rank."""
        of_rank = [(dp, state) for (dp, rank), state in sorted(states.items()) if rank == mp]
        return [RankState(state, dp, self.grid.rank(dp, mp)) for dp, state in of_rank]

    def partitions(self, mp: int) -> list[RankState]:
        """Return the optimizer's content in the optimizer files of one ``mp`` rank."""
        files = self.select(self.optimizers, mp)
        return [replace(file, state=file.state.inner("optimizer_state_dict")) for file in files]

    def read_file(self, file: str) -> State:
        """Return the state in the file of a layer or an expert, which is opened once."""
        if file not in self._states:
            self._states[file] = read_state(self.source, file)
        return self._states[file]


def read_checkpoint(source: Source, files: TagFiles) -> DeepSpeedCheckpoint:
    """Return all states of a tag. Raises Damaged if the file of a rank is missing."""
    if not files.models:
        message = f"{source.root}: no file of model states, such as mp_rank_00_model_states.pt or"
        message += " with ZeRO 3 zero_pp_rank_0_mp_rank_00_model_states.pt"
        hint = "use another copy, or the previous checkpoint"
        if files.optimizers:
            message += f", beside {plural(len(files.optimizers), 'file')} of optimizer states"
            hint += "; --from torch-save reads one of these by itself"
        raise Damaged(Problem(message, "file-missing").with_hint(hint))
    models = {ranks: read_state(source, file) for ranks, file in files.models.items()}
    optimizers, expert_optimizers = (
        {ranks: read_optimizer(source, file) for ranks, file in kind.items()}
        for kind in (files.optimizers, files.expert_optimizers)
    )
    grid = _read_grid(files, models[min(models)], optimizers)
    return DeepSpeedCheckpoint(source, files, models, optimizers, expert_optimizers, grid)


def _read_grid(files: TagFiles, first: State, optimizers: Mapping[Ranks, State]) -> Grid:
    """Return the degrees of parallelism; Damaged if the file of a rank is missing."""
    model_ranks = first.count("mp_world_size", 1 + max(mp for _, mp in files.models))
    data = _count_data_ranks(files, first, optimizers)
    _require_all(files.models, data if files.stage_3 else 1, model_ranks, "model states")
    if optimizers:
        _require_all(files.optimizers, data, model_ranks, "optimizer states")
    tensor = _count_tensor_ranks(files, first, model_ranks)
    if model_ranks % tensor:
        raise Damaged(
            f"{first.file.what}: {model_ranks} model ranks with {tensor} tensor ranks",
            "ranks-disagree",
        )
    return Grid(model_ranks // tensor, data, tensor)


def _require_all(files: Mapping[Ranks, str], dp: int, mp: int, what: str) -> None:
    """Raise Damaged if the file of a rank is missing, or belongs to a nonexistent rank."""
    for model_rank in range(mp):
        present = {d for d, m in files if m == model_rank}
        missing = find_missing_ranks(present, dp)
        if missing:
            ranks = ", ".join(map(str, missing))
            message = f"{what} of zero_pp_rank {ranks}, mp_rank {model_rank:02d} are missing:"
            message += f" found {len(present):,} of {dp:,} files"
            raise Damaged(message, "rank-missing")
    strays = [name for (d, m), name in files.items() if d >= dp or m >= mp]
    if strays:
        raise Damaged(
            f"{strays[0]} belongs to no rank of DP {dp:,} and {mp:,} model-parallel ranks",
            "saves-mixed",
            file=strays[0],
            hint="an earlier save with more ranks may have left it: move it away",
        )


def _count_data_ranks(files: TagFiles, first: State, optimizers: Mapping[Ranks, State]) -> int:
    """Return the number of data-parallel ranks, from partition_count for each group of them.

    If that cannot be read, the files are counted: nothing of an optimizer is placed then.
    """
    if not optimizers:
        ranks = 1 + max(dp for dp, _ in files.models)
        return ranks if files.stage_3 else first.count("dp_world_size")
    state = optimizers[min(optimizers)].inner("optimizer_state_dict")
    highest = 1 + max(dp for dp, _ in files.optimizers)
    try:
        counts = state.get("partition_count")
        if isinstance(counts, list | tuple) and counts and all(type(c) is int for c in counts):
            experts_only = first.count("dp_world_size") if first.get("num_experts") else 1
            return max([*map(int, counts), experts_only])
        return state.count("partition_count", highest)
    except Barred:
        return highest


def _count_tensor_ranks(files: TagFiles, first: State, model_ranks: int) -> int:
    """Return the tensor-parallel degree: stated since 0.19, else by the layers' files, else all."""
    degrees = first.inner("checkpoint_parallel_dimensions")
    if degrees.fields:
        return degrees.count("tp_degree")
    if files.layers:
        return 1 + max(tensor for _, tensor in files.layers)
    return model_ranks
