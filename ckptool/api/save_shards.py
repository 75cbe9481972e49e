"""Save what several ranks hold together: each writes its own shards, as torch's DCP does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath

from msgspec.structs import replace

from ckptool.commands.convert import ConvertReport, prepare_save
from ckptool.commands.open import OpenedCheckpoint, no_collecting
from ckptool.commands.options.target import SaveOptions
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, ObjectEntry, TensorEntry
from ckptool.core.state_category import with_parts
from ckptool.engine.check.digest import digests
from ckptool.engine.progress import Progress
from ckptool.engine.ranks import Ranks, RunningRanks
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.share import Share
from ckptool.errors import Problem, Unsupported, damaged
from ckptool.formats.base import Detection, Format, Reading
from ckptool.serialization.state_dict.values import same_value
from ckptool.storage.url import Location
from ckptool.storage.virtual.memory import MemoryFiles

TO_SAVE_SHARDS = (
    "to='dcp' writes the shards of all ranks, and `ckptool convert` makes every other format of"
    " that; or save full_tensor() on one rank"
)
_TO_NAME_APART = "use a different name on each rank for values that differ, such as rng.0 on rank 0"


Holders = dict[tuple[str, Box], dict[int, Chunk]]
"""For each box of each tensor: where it lies on the ranks that hold it."""


def open_memory(catalog: Catalog, source: MemoryFiles) -> OpenedCheckpoint:
    """Return what is in memory as an open checkpoint."""
    catalog = with_parts(catalog)
    row = Format("memory", "tensors in memory", Detection(), Reading(lambda _, options: catalog))
    return OpenedCheckpoint(FilePath("memory"), source, row, catalog)


class ShardsTransfer(Transfer[ConvertReport], frozen=True, kw_only=True):
    """Writes from the memory of ``world`` ranks; each writes the files made of its own bytes."""

    world: int

    def require_possible(self, ranks: Ranks) -> None:
        """Raise Unsupported if a file consists of bytes of several ranks."""
        for file in self.plan.layout.files:
            if any(chunk.rank != (file.rank or 0) for _, chunk in self.plan.chunks(file.parts)):
                kind = self.report.target_format
                raise Unsupported(
                    f"{kind}: {file.path} would hold shards of several ranks", hint=TO_SAVE_SHARDS
                )

    def _files_of(self, share: Share) -> list[int]:
        """Return the files of this share's rank; Unsupported without a common disk."""
        if share.size < self.world:
            raise Unsupported(
                f"{self.target}: is on several disks, and each rank has only its own shards",
                hint="save to a folder that all ranks see, or to a store, such as s3://bucket/name",
            )
        files = enumerate(self.plan.layout.files)
        return [at for at, file in files if (file.rank or 0) == share.position]


def save_shards(
    collect: Callable[[int], tuple[Catalog, MemoryFiles]],
    target: Location,
    options: SaveOptions,
    progress: Progress,
) -> ConvertReport:
    """Write what all ranks of the program's process group hold; all of them must call it.

    ``collect`` returns what is in this rank's memory, given its number. Raises Damaged if ranks
    hold different values under one name, Unsupported if the format has no file per rank; the same
    on every rank.
    """
    ranks = RunningRanks()
    try:
        with no_collecting():
            with ranks.together():
                catalog, source = collect(ranks.rank)
            planned = _prepare(catalog, source, target, options, ranks)
        return planned.run(progress, ranks)
    finally:
        ranks.close()


def _prepare(
    local: Catalog, source: MemoryFiles, target: Location, options: SaveOptions, ranks: Ranks
) -> ShardsTransfer:
    """Plan the save: the same on every rank."""
    states, tokens = zip(*ranks.gather((local, source.token)), strict=True)
    source.token = tokens[0]
    with ranks.together():
        holders = _find_holders([state.tensors for state in states])
    shared = [place for place, chunks in holders.items() if len(chunks) > 1]
    boxes = (_box_alone(local.tensors[name], holders[name, box][ranks.rank])
            for name, box in shared if ranks.rank in holders[name, box])  # fmt: skip
    sums = ranks.gather(digests(boxes, TensorSource(source), source.policy.workers))
    with ranks.together():
        _require_equal(holders, sums)
        opened = open_memory(_merge_states(states, holders), source)
        save = prepare_save(opened, target, options)
    return ShardsTransfer(
        opened, save.plan, save.target, save.options, save.report, save.decided, world=ranks.size
    )


def _find_holders(of_ranks: Sequence[Mapping[str, TensorEntry]]) -> Holders:
    """Return each box of each tensor with the ranks that hold it, in rank order.

    Raises Damaged if one name has different shapes or types on different ranks.
    """
    first: dict[str, tuple[int, TensorEntry]] = {}
    holders: Holders = defaultdict(dict)
    problems = []
    for rank, tensors in enumerate(of_ranks):
        for name, entry in tensors.items():
            owner, model = first.setdefault(name, (rank, entry))
            if (entry.shape, entry.dtype, entry.path) != (model.shape, model.dtype, model.path):
                looks = [f"{e.dtype.name} {list(e.shape)}" for e in (model, entry)]
                problem = f"{name}: {looks[0]} on rank {owner}, {looks[1]} on rank {rank}"
                problems.append(Problem(problem, tensor=name))
            for chunk in entry.chunks:
                holders[name, chunk.box][rank] = replace(chunk, rank=rank)
    if problems:
        raise damaged(problems, subject="the tensors of ranks", hint=_TO_NAME_APART)
    return holders


def _box_alone(entry: TensorEntry, chunk: Chunk) -> TensorEntry:
    """Return a box of a tensor as a tensor of its own, named after both."""
    whole = Box.whole(chunk.box.shape)
    name = f"{entry.name} {chunk.box}"
    return replace(entry, name=name, shape=whole.shape, chunks=(replace(chunk, box=whole),))


def _require_equal(holders: Holders, sums: Sequence[Mapping[str, str]]) -> None:
    """Raise Damaged if ranks hold different values of the same box."""
    problems = []
    for name, box in holders:
        label = f"{name} {box}"
        hexes = {rank: of_rank[label] for rank, of_rank in enumerate(sums) if label in of_rank}
        first = next(iter(hexes), 0)
        for rank, digest in hexes.items():
            if digest != hexes[first]:
                problem = f"{label}: rank {first} and rank {rank} hold different values"
                problems.append(Problem(problem, "replicas-differ", tensor=name))
                break
    if problems:
        raise damaged(problems, subject="the tensors of ranks", hint=_TO_NAME_APART)


def _merge_states(states: Sequence[Catalog], holders: Holders) -> Catalog:
    """Return all ranks' tensors and values as one checkpoint.

    If several ranks hold a box, the one with the fewest bytes so far writes it.
    """
    loads = [0] * len(states)
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    first = {name: entry for state in reversed(states) for name, entry in state.tensors.items()}
    for (name, box), of_ranks in holders.items():
        rank = min(of_ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += box.volume * first[name].dtype.itemsize
        chunks[name].append(of_ranks[rank])
    names = dict.fromkeys(name for state in states for name in state.tensors)
    tensors = {name: replace(first[name], chunks=tuple(chunks[name])) for name in names}
    files = {file: nbytes for state in states for file, nbytes in state.files.items()}
    return Catalog(states[0].format, tensors, _merge_objects(states), files)


def _merge_objects(states: Sequence[Catalog]) -> dict[str, ObjectEntry]:
    """Return the values of all ranks; Damaged if two of one name differ, or one is a tensor."""
    merged: dict[str, tuple[int, ObjectEntry]] = {}
    tensors = {name: rank for rank, state in enumerate(states) for name in state.tensors}
    problems = []
    for rank, state in enumerate(states):
        for name, entry in state.objects.items():
            first, model = merged.setdefault(name, (rank, entry))
            if name in tensors:
                problem = f"{name}: a tensor on rank {tensors[name]}, a value on rank {rank}"
                problems.append(Problem(problem, tensor=name))
            elif entry.path != model.path:
                places = f"{list(model.path)} on rank {first}, {list(entry.path)} on rank {rank}"
                problems.append(Problem(f"{name}: at {places}"))
            elif not same_value(entry.value, model.value):
                problems.append(Problem(f"{name}: ranks {first} and {rank} hold different values"))
    if problems:
        raise damaged(problems, subject="the values of ranks", hint=_TO_NAME_APART)
    return {name: entry for name, (_, entry) in merged.items()}
